"""How a product with a quantised weight is launched, by format, shape and number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    QuantizedWeight,
)

type Method = Literal["few", "stream", "share", "tall", "unpack", "e4m3", "hopper"]

_ENOUGH_WARPS = 8
"""On each multiprocessor: they keep the memory busy."""

_DEEP = 64
"""Tiles of the input, of 128, from which more rows per program and more splits pay."""

_FEW = 8
"""Tokens of the tensor cores' smallest product."""

_MAX_CHAINED = 64
"""Tokens of a chain's product by `triton_streaming`."""

_STREAMING_PROGRAMS = 3
"""On each multiprocessor."""

_RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own."""

_FEWER_PROGRAMS = 288
"""With 9 to 16 tokens, where a reader of one part less gains more than a third program."""

_SHARING_END = 20 * 1024
"""Bytes of shared memory that `triton_sharing`, one program on a multiprocessor, needs at its end,
beside its ring."""

_TALL = 65_536
"""Rows of an output matrix."""

_MOST_PARTS = 8
"""More partial sums than these cost their readers more than the product gains."""

_FROM_CODES = 64
"""Tokens up to which a 4-bit weight's bytes count more than what it costs to convert them."""

_MOST_UNPACKED = 256
"""Tokens up to which codes are unpacked for each 64 of them, where nothing multiplies e4m3: beyond,
a pass over the weight should cost less. Reckoned for an A100, not measured."""

_MOST_APART = 128
"""Tokens that become 8 bits in a kernel of their own, after a norm."""

_ENOUGH_TILES = Fraction(15, 22)
"""On each multiprocessor: programs of a product that the tensor cores bound. Fewer leave too many
of them idle."""

_ENOUGH_PROGRAMS = 2
"""On each multiprocessor: of two programs of a product that waits for instructions one fills the
gaps of the other."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A program takes `rows` of the weight and `tokens`; `splits` programs share the input."""

    method: Method = "unpack"
    """Weights to bfloat16 in registers, by `triton_few`, `triton_streaming`, `triton_sharing`,
    `triton_tall` or `triton`; or tokens beforehand and weights of 4 bits to e4m3, by `e4m3.triton`
    or on Hopper by `e4m3.hopper` and, of fp8 weights, `e4m3.hopper_bytes`. Of int8 weights e4m3
    means tokens in int8.
    """
    beforehand: bool = False
    """Weights of 4 bits become e4m3 in a pass of their own, not in registers."""
    rows: int = 64
    tokens: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    unroll: int = 1
    """Tiles of the input in one turn of the loop; in `triton`, a divisor of a split's tiles."""
    pieces: int = 1
    """Of `e4m3.hopper_bytes`: into how many a tile of the last turn may be cut."""
    first: bool = False
    """Of `triton_streaming`: the next kernel of the chain may be brought in before this one reads,
    not after."""


def choose(
    weight: QuantizedWeight,
    tokens: int,
    *,
    gated: bool,
    hopper: bool = False,
    e4m3: bool = True,
    target: Target,
) -> Config | None:
    """None: dequantise, then the product with the plain weight.

    Args:
      hopper: it is such a GPU.
      e4m3: it multiplies such numbers: from compute capability 8.9 on.

    The rules and their limits are the fastest of those measured on an H200 with Qwen3-4B's shapes;
    see lab/logs/quantised_weights.md.
    """
    out, depth = weight.shape
    if not _has_kernel(weight):
        return None
    tiles = depth // 128
    if tokens <= _MAX_CHAINED and target.pdl:
        config = _chained(weight, tokens, gated=gated, target=target)
    elif hopper and not gated and _is_tall(weight, tokens):
        return Config(method="tall", rows=384, tokens=32 if tokens <= 32 else 64, num_stages=3)
    elif tokens <= _FEW and isinstance(weight, Int4Weight):
        config = _few(depth, gated=gated)
    elif not _in_8_bits(weight, tokens, e4m3=e4m3):
        if tokens > _MOST_UNPACKED:
            return None
        config = _unpack(weight, tokens, out, tiles, target=target)
    elif hopper and isinstance(weight, Fp8Weight) and _bytes_on_hopper(weight, tokens):
        config = _hopper_bytes(tokens, out, tiles, target=target)
    elif hopper and _on_hopper(weight, tokens, gated=gated):
        config = _hopper(tokens, out, tiles, target=target)
    elif tokens <= _most_in_registers(weight):
        config = _e4m3_in_registers(weight, tokens, out, tiles, target=target)
    else:
        config = _e4m3(weight, tokens, out, tiles, target=target)
    if out % config.rows or (gated and out // 2 % (config.rows // 2)):
        return None
    return replace(config, splits=1) if gated else config


def reads_copy(tokens: int) -> bool:
    """Whether a product reads a 4-bit weight's copy in e4m3, if it has one, and not its codes."""
    return tokens > _FROM_CODES


def reads_quantized(weight: QuantizedWeight, tokens: int, config: Config) -> bool:
    """Whether it pays that a norm before a product in e4m3 makes its tokens' 8 bits: it takes up to
    1 % off a step of 256 rows. With fewer rows it made no difference, nor with NVFP4 in Triton."""
    if config.method == "hopper" and not isinstance(weight, Int4Weight):
        return True
    kinds = Int4Weight | Fp8Weight
    return (
        config.method in ("e4m3", "hopper") and tokens > _MOST_APART and isinstance(weight, kinds)
    )


def _has_kernel(weight: QuantizedWeight) -> bool:
    """Whether the kernels know the weight's groups and its depth."""
    if isinstance(weight, Int4Weight):
        return weight.group in (32, 64, 128)
    if isinstance(weight, Int8Weight | Fp8Weight):
        return weight.group in (128, weight.shape[1])
    return weight.shape[1] % 128 == 0


def _is_tall(weight: QuantizedWeight, tokens: int) -> bool:
    """Whether it is an output matrix of integers with a scale for each row, and so many tokens that
    their copies count, but not their products."""
    if not isinstance(weight, Int8Weight) or not 16 < tokens <= 64:
        return False
    out, depth = weight.shape
    return out >= _TALL and out % 128 == 0 and depth >= 256 and weight.group == depth


def _in_8_bits(weight: QuantizedWeight, tokens: int, *, e4m3: bool) -> bool:
    """Where the tensor cores' rate counts, or the instructions that unpack."""
    if not e4m3 and not isinstance(weight, Int8Weight):
        return False
    return tokens > (16 if isinstance(weight, Fp8Weight) else 64)


def _most_in_registers(weight: QuantizedWeight) -> int:
    """Tokens up to which 4 bits become e4m3 in registers: beyond it, or with very small groups,
    a pass over the weight costs less."""
    match weight:
        case Int8Weight() | Fp8Weight():
            return 0
        case Int4Weight():
            return 0 if weight.group == 32 else 512
        case _:
            return 256


def _few(depth: int, *, gated: bool) -> Config:
    """Four warps with up to five tiles each, which a thread has registers for; parts where there
    are more tiles, or more warps where there must not be parts."""
    tiles = depth // 128
    if not gated:
        return Config(method="few", rows=16, tokens=_FEW, splits=-(-tiles // 20))
    warps = next((warps for warps in (4, 8) if tiles <= 8 * warps), 16)
    return Config(method="few", rows=16, tokens=_FEW, num_warps=warps)


def _chained(weight: QuantizedWeight, tokens: int, *, gated: bool, target: Target) -> Config:
    """Warpgroups share many tokens where each multiprocessor gets about three of a weight's row
    tiles; that kernel knows 4-bit integers."""
    row_tiles = weight.shape[0] // 64
    three_each = 2 * target.gpu.multiprocessors < row_tiles <= 3 * target.gpu.multiprocessors
    if gated and tokens > 32 and three_each and isinstance(weight, Int4Weight):
        return _sharing(weight, target=target)
    return _streaming(weight, tokens, gated=gated, target=target)


def _streaming(weight: QuantizedWeight, tokens: int, *, gated: bool, target: Target) -> Config:
    """Rings that leave room for three programs per multiprocessor, and as many programs."""
    out, tiles = weight.shape[0], weight.shape[1] // 128
    tile, turn = next(each for each in ((8, 4), (16, 2), (32, 2), (64, 1)) if tokens <= each[0])
    size = 64 * _bytes_of_row(weight) + 256 * tile
    ring = target.gpu.shared_memory // _STREAMING_PROGRAMS - _RESERVED
    while turn > 1 and (tiles % turn or ring // (turn * size) < 3):
        turn //= 2
    stages = ring // (turn * size)
    rows = out // 64
    fewer = 8 < tokens <= 16
    parts = (
        -(-_FEWER_PROGRAMS // rows)
        if fewer
        else _STREAMING_PROGRAMS * target.gpu.multiprocessors // rows
    )
    parts = min(_MOST_PARTS, max(1, parts), tiles)
    splits = -(-tiles // steps(tiles, parts, turn))  # none is empty
    # Of many tokens attention, which then copies keys, but no product.
    first = tokens <= 16 or (tokens > 32 and not gated and out > weight.shape[1])
    return Config(
        method="stream", tokens=tile, splits=splits, num_stages=stages, unroll=turn, first=first
    )


def _sharing(weight: Int4Weight, *, target: Target) -> Config:
    """A program for each multiprocessor, with a ring that fills its shared memory."""
    ring = target.gpu.shared_memory_per_block - _SHARING_END
    stages = ring // (3 * 64 * _bytes_of_row(weight) + 256 * 64)
    return Config(method="share", tokens=64, num_stages=stages)


def shares_of(row_tiles: int, steps: int, *, target: Target) -> tuple[int, int]:
    """Of `triton_sharing`: how many programs share a third tile of rows, of which each multiplies
    some of the `steps` tiles of inputs, none nothing; and how many programs there are."""
    third = row_tiles - 2 * target.gpu.multiprocessors
    if not 0 < 2 * third <= target.gpu.multiprocessors:
        return 1, -(-row_tiles // 3)
    each = -(-steps // min(target.gpu.multiprocessors // third, steps))
    return -(-steps // each), target.gpu.multiprocessors


def _bytes_of_row(weight: QuantizedWeight) -> int:
    """In a tile of 128 inputs: codes, scales and zero points."""
    match weight:
        case Int4Weight(zero=zero):
            return 64 + 4 * (128 // weight.group) * (1 if zero is None else 2)
        case Int8Weight() | Fp8Weight():
            return 128 + 4 * (128 // weight.group)
        case Nvfp4Weight():
            return 64 + 8
        case _:  # MXFP4
            return 64 + 4


def steps(tiles: int, splits: int, turn: int) -> int:
    """Tiles of each split but the last, which has no more: whole turns, unless all have as many."""
    each = -(-tiles // splits)
    return each if tiles % each == 0 else -(-each // turn) * turn


def _unpack(
    weight: QuantizedWeight, tokens: int, out: int, tiles: int, *, target: Target
) -> Config:
    """Bound by memory: many warps, and partial sums where a weight has few rows."""
    token_tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    deep = tokens <= 32 and tiles >= _DEEP
    if isinstance(weight, Int8Weight | Fp8Weight):
        large = out > 65_536
        config = Config(
            rows=128 if large or tokens > 16 else 64,
            tokens=token_tile,
            num_warps=8 if tokens > 16 else 4,
            num_stages=4 if large and tokens <= 16 else 3,
        )
    else:
        config = Config(
            rows=128 if deep else 64,
            tokens=token_tile,
            num_stages=4 if tokens <= 16 or (tokens <= 32 and not deep) else 3,
            unroll=2 if isinstance(weight, Nvfp4Weight) else 1,  # its tiles are half as deep
        )
    warps = max(1, out // config.rows) * -(-tokens // token_tile) * config.num_warps
    return replace(
        config,
        splits=_splits(
            tiles, 19 if deep else 8, _ENOUGH_WARPS * target.gpu.multiprocessors / warps
        ),
    )


def _on_hopper(weight: QuantizedWeight, tokens: int, *, gated: bool) -> bool:
    """Where `e4m3.hopper` was the fastest of what was measured on an H200. Its tiles are of 256
    tokens, so that 384 are as slow as 512."""
    out, depth = weight.shape
    if isinstance(weight, Int8Weight | Fp8Weight) or out % 128 or tokens > 512:
        return False
    if not isinstance(weight, Int4Weight):
        return not gated or not 256 < tokens <= 384
    if weight.group != 128 or tokens <= 128 or (gated and tokens <= 384):
        return False
    return tokens > 384 or depth >= _DEEP * 128 or (tokens > 256 and out > depth)


def _bytes_on_hopper(weight: Fp8Weight, tokens: int) -> bool:
    """Where `e4m3.hopper_bytes` is the fastest: it has tiles of 128 tokens, and one scale a row."""
    out, depth = weight.shape
    return weight.group == depth and out % 128 == 0 and tokens > 128


def _hopper_bytes(tokens: int, out: int, tiles: int, *, target: Target) -> Config:
    """Large tiles, if there are enough for all multiprocessors, and a ring that fills shared
    memory; parts where few tiles are deep."""
    token_tiles = -(-tokens // 128)
    if out % 256 == 0 and out // 256 * token_tiles >= target.gpu.multiprocessors:
        return Config(method="hopper", rows=256, tokens=128, num_stages=4, pieces=4)
    parts = (
        3 if tiles >= _DEEP and out // 128 * token_tiles * 3 <= target.gpu.multiprocessors else 1
    )
    return Config(method="hopper", rows=128, tokens=128, splits=parts, num_stages=6, pieces=2)


def _hopper(tokens: int, out: int, tiles: int, *, target: Target) -> Config:
    """A program for each multiprocessor, and as many of its tiles as fit its shared memory."""
    tile = 128 if tokens <= 128 else 256
    programs = out // 128 * -(-tokens // tile)
    splits = min(max(1, target.gpu.multiprocessors // programs), tiles, _MOST_PARTS)
    splits = -(-tiles // -(-tiles // splits))  # none is empty
    stages = 6 if tile == 128 else 4
    return Config(method="hopper", rows=128, tokens=tile, splits=splits, num_stages=stages)


def _e4m3_in_registers(
    weight: QuantizedWeight, tokens: int, out: int, tiles: int, *, target: Target
) -> Config:
    """Bound by instructions: small tiles of integers, whose sums are scaled in every turn."""
    config = Config(method="e4m3", tokens=64 if isinstance(weight, Int4Weight) else 128)
    programs = out // config.rows * -(-tokens // config.tokens)
    return replace(
        config, splits=_splits(tiles, 4, _ENOUGH_PROGRAMS * target.gpu.multiprocessors / programs)
    )


def _e4m3(weight: QuantizedWeight, tokens: int, out: int, tiles: int, *, target: Target) -> Config:
    """Few tokens: bound by memory. Many: by the tensor cores, or nearly, and then tiles are as
    large as leave none of them idle."""
    if tokens <= 64:
        config = Config(method="e4m3", tokens=32 if tokens <= 32 else 64)
    elif out // 128 * -(-tokens // 128) >= target.gpu.multiprocessors:
        config = Config(method="e4m3", rows=128, tokens=128, num_stages=3)
    else:
        config = Config(method="e4m3", tokens=128)
    programs = out // config.rows * -(-tokens // config.tokens)
    splits = _splits(tiles, 4, _ENOUGH_TILES * target.gpu.multiprocessors / programs)
    return replace(config, splits=splits, beforehand=not isinstance(weight, Int8Weight | Fp8Weight))


def _splits(tiles: int, most: int, wanted: float | Fraction) -> int:
    """The fewest equal parts of the input's tiles, of at most `most`, that are `wanted` or more."""
    divisors = [splits for splits in range(1, most + 1) if tiles % splits == 0]
    enough = [splits for splits in divisors if splits >= wanted]
    return enough[0] if enough else divisors[-1]
