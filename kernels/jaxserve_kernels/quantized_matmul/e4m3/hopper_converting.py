"""Products of many tokens in e4m3 with weights of 4 bits, on Hopper: one warpgroup converts.

As `hopper_bytes`, whose two warpgroups multiply here too; a third is between memory and them. It
copies codes and scales into a ring in shared memory (TMA), makes e4m3 of them in the ring that the
others read, where it also has tokens copied to. So converting takes no turns with multiplying. What
it makes is the weight's `e4m3_copy`, byte for byte but for ties.

Measured by `scripts/bench_matmul.py` (formats -converting); the engine does not use it yet.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxserve_kernels.dense_matmul.hopper import divide
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.hopper_bytes import (
    DEPTH,
    TOKENS,
    multiply_tiles,
    place_of,
)
from jaxserve_kernels.quantized_matmul.e4m3.hopper_codes import converted, of_rows
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO, NVFP4, arrays, kind
from jaxserve_kernels.target import MULTIPROCESSORS
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Int4Weight, Mxfp4Weight, Nvfp4Weight

_TOKENS = gl.constexpr(TOKENS)
_DEPTH = gl.constexpr(DEPTH)
_NVFP4 = gl.constexpr(NVFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

_MOST_PARTS = 8
"""Programs that share a tile's inputs: more partial sums cost their readers too much."""


@gluon.jit
def _copy_block(source, ring, bar, tile, row):
    """One box of all tiles of rows: [halves, tiles, rows, words] become one matrix."""
    shape: gl.constexpr = source.block_shape
    place = ring.slice(0, shape[0] * shape[1] * shape[2], dim=0)
    place = place._reinterpret(ring.dtype, [shape[0], shape[1], shape[2], shape[3]], source.layout)
    tma.async_copy_global_to_shared(source, [0, tile, row, 0], bar, place)


@gluon.jit
def _copy_codes(
    packed, scale, zero, code_ring, scale_ring, zero_ring, coded, slot, column, step,
    ROWS: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Codes and scales of 128 inputs of a tile into a place of their ring."""
    WORD_ROWS: gl.constexpr = 128 if KIND == _NVFP4 else 64
    SCALES: gl.constexpr = 2 if ZERO != _NO_ZERO else 1
    bar = coded.index(slot)
    tile = column // 64
    mbarrier.expect(bar, ROWS * _DEPTH // 2 + ROWS * GROUPS * 4 * SCALES)
    _copy_block(packed, code_ring.index(slot), bar, tile, step * WORD_ROWS)
    _copy_block(scale, scale_ring.index(slot), bar, tile, step * GROUPS)
    if ZERO != _NO_ZERO:
        _copy_block(zero, zero_ring.index(slot), bar, tile, step * GROUPS)


@gluon.jit
def _copy_ahead(
    packed, scale, zero, packed_piece, scale_piece, zero_piece, code_ring, scale_ring, zero_ring,
    coded, slot, tile, step, program, programs, tokens, tiles, whole,
    pieces: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    KIND: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """Codes of a step of this program's, if there is one; the tile and step after it."""
    COLUMNS: gl.constexpr = ROWS // 2 if GATED else ROWS
    _, column, _, first, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
    if tile < whole:
        _copy_codes(
            packed, scale, zero, code_ring, scale_ring, zero_ring, coded, slot, column,
            first + step, ROWS, KIND, GROUPS, ZERO,
        )  # fmt: skip
    elif tile < tiles:
        _copy_codes(
            packed_piece, scale_piece, zero_piece, code_ring, scale_ring, zero_ring, coded, slot,
            column + program % pieces * (COLUMNS // pieces), first + step, ROWS // pieces, KIND,
            GROUPS, ZERO,
        )  # fmt: skip
    step += 1
    if step == steps:
        step = 0
        following = tile + programs
        following = gl.where(following < whole, following, whole + program // pieces)
        tile = gl.where(tile < whole, following, tiles)
    return tile, step


@gluon.jit
def _convert_tile(
    x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring, code_ring,
    scale_ring, zero_ring, coded, ready, free, row_scale_ptr, at, next_tile, next_step,
    token, column, first_step, steps, program, programs, tokens, tiles, whole,
    pieces: gl.constexpr, ALL: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr,
    GROUPS: gl.constexpr, ZERO: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows, from step `at` of the rings on: the step after it, and the tile and step
    whose codes are next. ALL: rows of whole tiles."""
    TILES: gl.constexpr = 2 if ROWS >= 128 else 1
    WORD_ROWS: gl.constexpr = TILES * (128 if KIND == _NVFP4 else 64)
    by_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    of_some = of_rows(row_scale_ptr, column, 0, TILES, ROWS, GATED, KIND, n)
    of_others = of_some
    if ROWS == 256:
        of_others = of_rows(row_scale_ptr, column, 128, TILES, ROWS, GATED, KIND, n)
    for step in range(first_step, first_step + steps):
        slot = at % AHEAD
        stage = at % STAGES
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), _TOKENS * _DEPTH)
        place = x_ring.index(stage)
        tma.async_copy_global_to_shared(x, [token, step * _DEPTH], ready.index(stage), place)
        mbarrier.wait(coded.index(slot), (at // AHEAD) & 1)
        w = w_ring.index(stage)._reinterpret(gl.int8, [ALL, _DEPTH], by_bytes)
        for part in gl.static_range(ROWS // (64 * TILES)):
            codes = code_ring.index(slot).slice(part * WORD_ROWS, WORD_ROWS, dim=0)
            scales = scale_ring.index(slot).slice(part * TILES * GROUPS, TILES * GROUPS, dim=0)
            zeros = zero_ring.index(slot).slice(part * TILES * GROUPS, TILES * GROUPS, dim=0)
            made = converted(
                codes, scales, zeros, of_others if part else of_some, TILES, KIND, GROUPS, ZERO
            )
            w.slice(part * 64 * TILES, 64 * TILES, dim=0).store(made)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(stage), count=1)
        next_tile, next_step = _copy_ahead(
            packed, scale, zero, packed_piece, scale_piece, zero_piece, code_ring, scale_ring,
            zero_ring, coded, slot, next_tile, next_step, program, programs, tokens, tiles, whole,
            pieces, ALL, GATED, SPLITS, KIND, GROUPS, ZERO, k,
        )  # fmt: skip
        at += 1
    return at, next_tile, next_step


@gluon.jit
def _convert(
    x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring, code_ring,
    scale_ring, zero_ring, coded, ready, free, row_scale_ptr, program, programs, tokens, tiles,
    whole, pieces: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies and converts. Programs that run together share the rows of few
    weights, and all tokens."""
    COLUMNS: gl.constexpr = ROWS // 2 if GATED else ROWS
    at = 0
    next_tile = gl.where(program < whole, program, whole + program // pieces)
    next_step = 0
    for slot in gl.static_range(AHEAD):
        next_tile, next_step = _copy_ahead(
            packed, scale, zero, packed_piece, scale_piece, zero_piece, code_ring, scale_ring,
            zero_ring, coded, slot, next_tile, next_step, program, programs, tokens, tiles, whole,
            pieces, ROWS, GATED, SPLITS, KIND, GROUPS, ZERO, k,
        )  # fmt: skip
    for tile in range(program, whole, programs):
        token, column, _, first, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        at, next_tile, next_step = _convert_tile(
            x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring,
            code_ring, scale_ring, zero_ring, coded, ready, free, row_scale_ptr, at, next_tile,
            next_step, token, column, first, steps, program, programs, tokens, tiles, whole,
            pieces, ROWS, ROWS, GATED, SPLITS, STAGES, AHEAD, KIND, GROUPS, ZERO, n, k,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < tiles:
        token, column, _, first, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        _convert_tile(
            x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring,
            code_ring, scale_ring, zero_ring, coded, ready, free, row_scale_ptr, at, next_tile,
            next_step, token, column + program % pieces * (COLUMNS // pieces), first, steps,
            program, programs, tokens, tiles, whole, pieces, ROWS, ROWS // pieces, GATED, SPLITS,
            STAGES, AHEAD, KIND, GROUPS, ZERO, n, k,
        )  # fmt: skip


@gluon.jit
def _product(
    x, packed, scale, zero, packed_piece, scale_piece, zero_piece, token_scale_ptr, row_scale_ptr,
    tokens, tiles, whole, out_ptr,
    pieces: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """n: columns of the result; gated, half of the weight's rows. GROUPS: rows of scales of 128
    inputs. AHEAD: steps whose codes are there or under way."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    WORD_ROWS: gl.constexpr = 2 * ROWS if KIND == _NVFP4 else ROWS
    WORDS: gl.constexpr = packed.block_shape[3]
    SCALES: gl.constexpr = ROWS // 64 * GROUPS
    by_words: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    by_codes: gl.constexpr = gl.NVMMASharedLayout(2 * WORDS, 16, rank=2)
    plain: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _TOKENS, _DEPTH], x.layout)
    w_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, ROWS, _DEPTH // 2], by_words)
    code_ring = gl.allocate_shared_memory(gl.uint16, [AHEAD, WORD_ROWS, WORDS], by_codes)
    scale_ring = gl.allocate_shared_memory(scale.dtype, [AHEAD, SCALES, 64], plain)
    zero_ring = scale_ring
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(zero.dtype, [AHEAD, SCALES, 64], plain)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    coded = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)  # tokens, and the weight's e4m3
        mbarrier.init(free.index(stage), count=2)
    for slot in gl.static_range(AHEAD):
        mbarrier.init(coded.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x_ring, w_ring, ready, free, token_scale_ptr, row_scale_ptr, out_ptr, program,
                programs, tokens, tiles, whole, 0, pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
            (multiply_tiles, (
                x_ring, w_ring, ready, free, token_scale_ptr, row_scale_ptr, out_ptr, program,
                programs, tokens, tiles, whole, 1, pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
            (_convert, (
                x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring,
                code_ring, scale_ring, zero_ring, coded, ready, free, row_scale_ptr, program,
                programs, tokens, tiles, whole, pieces, ROWS, GATED, SPLITS, STAGES, AHEAD, KIND,
                GROUPS, ZERO, n, k,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip


def choose(tokens: int, out: int, depth: int, *, gated: bool) -> Config:
    """As `hopper_bytes` is launched, with as many steps in both rings as shared memory holds."""
    token_tiles = -(-tokens // TOKENS)
    if out % 256 == 0 and out // 256 * token_tiles >= MULTIPROCESSORS:
        return Config(method="hopper", rows=256, tokens=TOKENS, num_stages=3, unroll=3, pieces=2)
    programs = out // 128 * token_tiles
    parts = 1 if gated else max(1, min(MULTIPROCESSORS // programs, _MOST_PARTS))
    steps = depth // DEPTH
    parts = -(-steps // -(-steps // parts))  # none is empty
    return Config(
        method="hopper", rows=128, tokens=TOKENS, splits=parts, num_stages=4, unroll=5, pieces=2
    )


def launch(
    x: QuantizedTokens,
    weight: Int4Weight | Nvfp4Weight | Mxfp4Weight,
    row_scale: Array,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
) -> Array:
    """The product, of type `out_type`: see `api`.

    Args:
      x: in the order of the weight's inputs.
      weight: integers in groups of 64 or 128, NVFP4 or MXFP4.
      row_scale: float32 [out / 64, 1, 64], of the weight's `e4m3_copy`.
      config: `unroll` is how many steps' codes are there or under way.
    """
    tokens, k = x.shape
    out = weight.shape[0]
    tiles = -(-tokens // TOKENS) * (out // config.rows) * config.splits
    narrowest = 128 if gated else 64  # rows: the weight lies in tiles of 64
    whole, pieces = divide(tiles, MULTIPROCESSORS, min(config.pieces, config.rows // narrowest))
    packed, scale, zero = arrays(weight)
    groups = scale.shape[-2] * DEPTH // k
    words = packed.shape[-1]
    boxes = functools.partial(_boxes, config=config, pieces=pieces, halves=2 if gated else 1)
    by_bytes = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    kinds = kind(weight)
    has_zeros = kinds["ZERO"] != NO_ZERO.value
    described = (
        boxes(packed, 2048 // words, 2 * words),
        boxes(scale, groups, 0),
        boxes(zero if has_zeros else scale, groups, 0),
    )
    return triton_call(
        tensor_descriptor(x.codes, (TOKENS, DEPTH), by_bytes),
        *(each[0] for each in described), *(each[1] for each in described),
        x.scale, row_scale, tokens, tiles, whole,
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_hopper_converting_{type(weight).__name__}",
        out_type=out_type,
        grid=(MULTIPROCESSORS if whole else tiles * pieces,),
        num_warps=4,
        pieces=pieces, ROWS=config.rows, GATED=gated, SPLITS=config.splits,
        STAGES=config.num_stages, AHEAD=config.unroll, GROUPS=groups, KIND=kinds["KIND"],
        ZERO=kinds["ZERO"], n=out_type.shape[-1], k=k,
    )  # fmt: skip


def _boxes(
    array: Array, rows: int, swizzle: int, *, config: Config, pieces: int, halves: int
) -> tuple[Any, Any]:
    """Of [out / 64, ..., words]: blocks of a tile's 128 inputs, which have so many `rows` for each
    64 of the weight, and those of a piece."""
    array = array.reshape(halves, array.shape[0] // halves, -1, array.shape[-1])
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * array.dtype.itemsize, rank=4
    )
    tiles = config.rows // 64 // halves
    whole, piece = (
        tensor_descriptor(array, (halves, tiles // cut, rows, array.shape[-1]), layout)
        for cut in (1, pieces)
    )
    return whole, piece
