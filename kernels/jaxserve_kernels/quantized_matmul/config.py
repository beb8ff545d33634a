"""Launch parameters of each kernel that multiplies with a quantised weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from jaxserve_kernels import tables
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Kind, Operand, Quantized

type Method = Literal["small_m", "streaming", "stream_k", "large_n", "unpack", "e4m3", "hopper"]

SMALL_M = 8
"""Tokens of the tensor cores' smallest product."""

_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves for each program."""

_STREAM_K_END = 20 * 1024
"""Bytes of shared memory that `triton_stream_k` needs for its epilogue, beside its ring. It runs
one program per multiprocessor."""


class Limits(NamedTuple):
    """See `tables/quantized_matmul/`."""

    warps_per_multiprocessor: int
    deep_tiles: int
    streaming_programs: int
    most_streaming_programs: int
    programs_of_16_tokens: Fraction
    large_n_rows: int
    most_splits: int
    most_from_codes: int
    most_in_bfloat16: int
    most_in_bfloat16_fp8: int
    most_in_bfloat16_int4: int
    most_in_registers_int4: int
    most_in_registers_fp4: int
    most_unpacked: int
    most_quantized_apart: int
    e4m3_tiles: Fraction
    e4m3_register_programs: int


def limits_of(target: Target) -> Limits:
    """The limits measured on the nearest card."""
    return tables.limits("quantized_matmul", Limits, target)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters. A program multiplies `rows` of the weight with `tokens` tokens; `splits`
    programs share the inputs."""

    method: Method = "unpack"
    """Selects the kernel. Two families:

    - `triton_small_m`, `triton_streaming`, `triton_stream_k`, `triton_large_n` and `triton` convert
      codes to bfloat16 in registers; with `int8_tokens` to int8.
    - `e4m3.triton`, and on Hopper `e4m3.hopper` and (fp8 weights) `e4m3.hopper_bytes` take tokens
      that were quantised before, and convert 4-bit codes to e4m3. With int8 weights the tokens are
      int8.
    """
    beforehand: bool = False
    """4-bit codes are converted to e4m3 by a kernel before the product, not in its registers."""
    rows: int = 64
    tokens: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    unroll: int = 1
    """Input tiles per iteration of the loop; in `triton`, a divisor of a split's tiles."""
    pieces: int = 1
    """`e4m3.hopper_bytes` only: the most pieces into which a tile of the last wave is cut."""
    halved: int = 0
    """`triton_streaming` only, gated: the number of row tiles, the last ones, of which two programs
    take a half of the inputs each."""
    int8_tokens: bool = False
    """`triton_streaming` and `triton_stream_k` with 4-bit integers: the tokens are int8, with a
    scale for each group of the weight's inputs."""
    first: bool = False
    """`triton_streaming` only: the next kernel may start before this one reads its weights, not
    only after."""


class Call(NamedTuple):
    """The properties of a product on which the rules depend."""

    shape: tuple[int, ...]
    """The weight's shape, [out, in]."""
    operand: Operand
    tokens: int
    gated: bool
    target: Target
    hopper: bool
    """Whether the kernels written for Hopper can run."""
    e4m3: bool
    """Whether the GPU's tensor cores multiply e4m3: from compute capability 8.9 on."""

    @classmethod
    def of(
        cls,
        weight: Quantized,
        tokens: int,
        *,
        gated: bool,
        hopper: bool = False,
        e4m3: bool = True,
        target: Target,
    ) -> Call | None:
        """The product's properties; None if no kernel supports the weight's groups or number of
        inputs."""
        operand = weight.operand
        if operand is None:
            return None
        return cls(weight.shape, operand, tokens, gated, target, hopper, e4m3)

    @property
    def out(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    @property
    def depth(self) -> int:
        """Number of inputs."""
        return self.shape[1]

    @property
    def tiles(self) -> int:
        """Number of tiles of 128 inputs."""
        return self.depth // 128

    @property
    def scale_per_row(self) -> bool:
        """Whether each row has one scale, rather than one per group of inputs."""
        return self.operand.group == self.depth

    @property
    def limits(self) -> Limits:
        """See `limits_of`."""
        return limits_of(self.target)


def small_m(depth: int, *, gated: bool) -> Config:
    """Four warps with up to five tiles each, as many as fit in registers. With more tiles: several
    splits, or more warps for a gated product, which cannot be split."""
    tiles = depth // 128
    if not gated:
        return Config(method="small_m", rows=16, tokens=SMALL_M, splits=-(-tiles // 20))
    warps = next((warps for warps in (4, 8) if tiles <= 8 * warps), 16)
    return Config(method="small_m", rows=16, tokens=SMALL_M, num_warps=warps)


def streaming(call: Call) -> Config:
    """Three programs per multiprocessor, with rings that leave room for as many; for few tokens up
    to five, if fewer would take turns."""
    out, tiles, tokens, target = call.out, call.tiles, call.tokens, call.target
    tile, most = next(each for each in ((8, 4), (16, 2), (32, 2), (64, 1)) if tokens <= each[0])
    size = 64 * call.operand.row_bytes + _token_bytes(call) * tile
    limits = call.limits
    rows = out // 64
    multiprocessors = target.gpu.multiprocessors
    if 8 < tokens <= 16:
        parts = -(-math.floor(limits.programs_of_16_tokens * multiprocessors) // rows)
    else:
        parts = limits.streaming_programs * multiprocessors // rows
    if tokens <= 8 and parts * rows < 2 * multiprocessors:
        parts += 1  # fewer than two programs on a multiprocessor would wait for the memory
    parts = 1 if call.gated else min(limits.most_splits, max(1, parts), tiles)
    resident = limits.streaming_programs
    if tokens <= 16:
        resident = _resident(rows * parts, multiprocessors, limits)
    ring = target.gpu.shared_memory // resident - _RESERVED
    k_tiles = most if resident == limits.streaming_programs else min(most, 2)
    while k_tiles > 1 and (tiles % k_tiles or ring // (k_tiles * size) < 3):
        k_tiles //= 2
    stages = ring // (k_tiles * size)
    splits = -(-tiles // steps(tiles, parts, k_tiles))  # none is empty
    halved = 0
    # With fewer tokens the next kernel fills the gaps; more were not tried. A half fills its ring.
    if call.gated and 16 < tokens <= 32 and tiles // 2 >= stages * k_tiles:
        halved = _halved(rows, resident * multiprocessors)
    # With many tokens only attention gains from an early start: it copies keys. Products do not.
    first = tokens <= 16 or (tokens > 32 and not call.gated and out > call.depth)
    return Config(
        method="streaming",
        tokens=tile,
        splits=splits,
        num_stages=stages,
        unroll=k_tiles,
        halved=halved,
        int8_tokens=reads_int8(call),
        first=first,
    )


def _halved(programs: int, at_once: int) -> int:
    """How many row tiles of `triton_streaming` two programs share: all of the last wave, unless it
    is the only one, or the programs would not all fit into it."""
    rest = programs % at_once
    return rest if programs > at_once and 2 * rest <= at_once else 0


def _resident(programs: int, multiprocessors: int, limits: Limits) -> int:
    """Programs of `triton_streaming` for which a multiprocessor should have room: the number with
    which the busiest one has the fewest in its turns, all of which last equally long."""

    def work(resident: int) -> int:
        at_once = resident * multiprocessors
        if programs <= at_once:
            return -(-programs // multiprocessors)
        return -(-programs // at_once) * resident

    choices = range(limits.streaming_programs, limits.most_streaming_programs + 1)
    return min(choices, key=work)  # the first of equals has the deepest ring


def stream_k(call: Call) -> Config:
    """One program per multiprocessor, with a ring that fills its shared memory."""
    ring = call.target.gpu.shared_memory_per_block - _STREAM_K_END
    stages = ring // (3 * 64 * call.operand.row_bytes + 64 * _token_bytes(call))
    return Config(method="stream_k", tokens=64, num_stages=stages, int8_tokens=reads_int8(call))


def reads_int8(call: Call) -> bool:
    """Whether a streaming product reads int8 tokens: with 4-bit integers, which take fewer
    instructions then. Tokens of products with more outputs than inputs come from norms, which
    quantise them; before others a kernel would have to."""
    wide = call.gated or call.out > call.depth
    many = call.tokens > call.limits.most_in_bfloat16_int4
    return takes_int8(call.operand) and wide and many


def takes_int8(operand: Operand) -> bool:
    """Whether streaming products can multiply a weight with int8 tokens."""
    return operand.kind == Kind.INT4 and operand.group == 128


def _token_bytes(call: Call) -> int:
    """Bytes in a ring of a token's 128 inputs, with the scale of int8 ones."""
    return int8_bytes(call.operand) if reads_int8(call) else 256


def int8_bytes(operand: Operand) -> int:
    """Bytes of 128 inputs of an int8 token with their scale, and their sum if there are zero
    points."""
    return 128 + (8 if operand.zero else 4)


def steps(tiles: int, splits: int, k_tiles: int) -> int:
    """Input tiles of each split but the last, which may have fewer. A multiple of `k_tiles`, unless
    all splits have the same number."""
    each = -(-tiles // splits)
    return each if tiles % each == 0 else -(-each // k_tiles) * k_tiles


def unpack(call: Call) -> Config:
    """Memory-bound: many warps, and several splits if a weight has few rows."""
    out, tiles, tokens = call.out, call.tiles, call.tokens
    token_tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    deep = tokens <= 32 and tiles >= call.limits.deep_tiles
    if call.operand.bits == 8:
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
            unroll=128 // call.operand.inputs_per_tile,
        )
    warps = max(1, out // config.rows) * -(-tokens // token_tile) * config.num_warps
    wanted = call.limits.warps_per_multiprocessor * call.target.gpu.multiprocessors / warps
    return replace(config, splits=_splits(tiles, 19 if deep else 8, wanted))


def hopper_bytes(call: Call) -> Config:
    """Large tiles if there are enough for all multiprocessors, and a ring that fills shared memory.
    A weight with few rows and many inputs is split."""
    out, token_tiles = call.out, -(-call.tokens // 128)
    multiprocessors = call.target.gpu.multiprocessors
    if out % 256 == 0 and out // 256 * token_tiles >= multiprocessors:
        return Config(method="hopper", rows=256, tokens=128, num_stages=4, pieces=4)
    deep = call.tiles >= call.limits.deep_tiles
    parts = 3 if deep and out // 128 * token_tiles * 3 <= multiprocessors else 1
    return Config(method="hopper", rows=128, tokens=128, splits=parts, num_stages=6, pieces=2)


def hopper_codes(call: Call) -> Config:
    """One program per multiprocessor, with as many ring stages as fit its shared memory."""
    tile = 128 if call.tokens <= 128 else 256
    programs = call.out // 128 * -(-call.tokens // tile)
    each = max(1, call.target.gpu.multiprocessors // programs)
    splits = min(each, call.tiles, call.limits.most_splits)
    splits = -(-call.tiles // -(-call.tiles // splits))  # none is empty
    stages = 6 if tile == 128 else 4
    return Config(method="hopper", rows=128, tokens=tile, splits=splits, num_stages=stages)


def e4m3_in_registers(call: Call) -> Config:
    """Instruction-bound. Integers take small tiles, because their sums are scaled in every
    k-step."""
    config = Config(method="e4m3", tokens=64 if call.operand.kind == Kind.INT4 else 128)
    return _shared(call, config, call.limits.e4m3_register_programs)


def e4m3_beforehand(call: Call) -> Config:
    """Memory-bound for few tokens. For many tokens nearly bound by the tensor cores: the largest
    tiles that leave no multiprocessor idle."""
    tokens = call.tokens
    if tokens <= 64:
        config = Config(method="e4m3", tokens=32 if tokens <= 32 else 64)
    elif call.out // 128 * -(-tokens // 128) >= call.target.gpu.multiprocessors:
        config = Config(method="e4m3", rows=128, tokens=128, num_stages=3)
    else:
        config = Config(method="e4m3", tokens=128)
    config = replace(config, beforehand=call.operand.bits == 4)
    return _shared(call, config, call.limits.e4m3_tiles)


def _shared(call: Call, config: Config, wanted: int | Fraction) -> Config:
    """The configuration with enough splits for `wanted` programs per multiprocessor."""
    programs = call.out // config.rows * -(-call.tokens // config.tokens)
    splits = _splits(call.tiles, 4, wanted * call.target.gpu.multiprocessors / programs)
    return replace(config, splits=splits)


def _splits(tiles: int, most: int, wanted: float | Fraction) -> int:
    """The smallest number of equal splits of the input tiles that is at least `wanted`, and at most
    `most`."""
    divisors = [splits for splits in range(1, most + 1) if tiles % splits == 0]
    enough = [splits for splits in divisors if splits >= wanted]
    return enough[0] if enough else divisors[-1]
