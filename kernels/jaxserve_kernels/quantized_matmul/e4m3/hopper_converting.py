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
from jaxserve_kernels.quantized_matmul.e4m3.hopper_bytes import DEPTH, TOKENS, _multiply, _place
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.e4m3.triton import (
    _e2m1_times,
    _mxfp4_factor,
    _nvfp4_eighths,
)
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, NVFP4, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_unpack import four_side_by_side
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Int4Weight, Mxfp4Weight, Nvfp4Weight

_TOKENS = gl.constexpr(TOKENS)
_DEPTH = gl.constexpr(DEPTH)
_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

_MULTIPROCESSORS = 132
"""Programs that share the tiles."""

_MOST_PARTS = 8
"""Programs that share a tile's inputs: more partial sums cost their readers too much."""

_LANES = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
_ROW_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], _LANES, [[32, 0], [64, 0]], [], [128, 32]
    )
)
"""Words of 128 rows by 128 inputs: a row to a thread."""

_HALF_ROW_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [64, 0]], _LANES, [[32, 0], [128, 0]], [], [256, 16]
    )
)
"""The same where words are of 64 inputs: both of a row."""

_FEW_ROW_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], _LANES, [[32, 0], [0, 16]], [], [64, 32]
    )
)
"""Of 64 rows: half a row to a thread."""

_FEW_HALF_ROW_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], _LANES, [[32, 0], [64, 0]], [], [128, 16]
    )
)


@gluon.jit
def four_bytes(a, b, c, d):
    """float32 values to registers of four e4m3 bytes."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 p, q;
        cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.rn.satfinite.e4m3x2.f32 q, $4, $3;
        mov.b32 $0, {p, q}; }""",
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def look_up(words, low, low2, low3, low4, high, high2, high3, high4):
    """Four planes of bytes: what tables of 16 bytes have at the nibbles. `low` to `low4` is the
    table of the two low nibbles of a word, from code 0 up, `high` to `high4` that of the others.

    A selector is three bits: the fourth chooses between halves of a table, by the sign of a byte.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 both, codes, up, first, second, less, more, is, w, x, y, z;
        prmt.b32 both, $4, $5, 0x6420;
        and.b32 codes, both, 0x77777777; shl.b32 up, both, 4;
        prmt.b32 is, up, both, 0xd9c8;
        prmt.b32 less, $6, $10, codes; prmt.b32 more, $14, $18, codes;
        lop3.b32 first, is, more, less, 0xca;
        shr.u32 codes, codes, 16; prmt.b32 is, up, both, 0xfbea;
        prmt.b32 less, $6, $10, codes; prmt.b32 more, $14, $18, codes;
        lop3.b32 second, is, more, less, 0xca;
        prmt.b32 w, first, second, 0x6420; prmt.b32 x, first, second, 0x7531;
        prmt.b32 both, $4, $5, 0x7531;
        and.b32 codes, both, 0x77777777; shl.b32 up, both, 4;
        prmt.b32 is, up, both, 0xd9c8;
        prmt.b32 less, $22, $26, codes; prmt.b32 more, $30, $34, codes;
        lop3.b32 first, is, more, less, 0xca;
        shr.u32 codes, codes, 16; prmt.b32 is, up, both, 0xfbea;
        prmt.b32 less, $22, $26, codes; prmt.b32 more, $30, $34, codes;
        lop3.b32 second, is, more, less, 0xca;
        prmt.b32 y, first, second, 0x6420; prmt.b32 z, first, second, 0x7531;
        mov.b32 $0, w; mov.b32 $1, x; mov.b32 $2, y; mov.b32 $3, z; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, low2, low3, low4, high, high2, high3, high4],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _group(
    ring, group: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr, rows: gl.constexpr
):  # fmt: skip
    """[rows]: what belongs to one of the groups of inputs, of [TILES * GROUPS, 64] in memory."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    last: gl.constexpr = [1, 0] if TILES == 2 else [0, 0]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[0, 32], last], [], [TILES, 64]
    )
    view = ring._reinterpret(ring.dtype, [TILES, GROUPS * 64], flat)
    values = view.slice(group * 64, 64, dim=1).load(layout).reshape([TILES * 64])
    return gl.convert_layout(values, rows, assert_trivial=True)


@gluon.jit
def _table(
    words, scales, zeros, factor, group: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
):  # fmt: skip
    """What the 16 codes mean in a group of inputs, over the scale of the row's copy: four bytes of
    e4m3 in each of four registers."""
    rows: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    scale = _group(scales, group, TILES, GROUPS, rows)
    zero = 8.0
    if ZERO != _NO_ZERO:
        zero = _group(zeros, group, TILES, GROUPS, rows).to(gl.float32)
    a = _four_codes(0, scale, zero, factor)
    b = _four_codes(4, scale, zero, factor)
    c = _four_codes(8, scale, zero, factor)
    d = _four_codes(12, scale, zero, factor)
    return _each(a, words), _each(b, words), _each(c, words), _each(d, words)


@gluon.jit
def _four_codes(first: gl.constexpr, scale, zero, factor):
    return four_bytes(
        (first - zero) * scale * factor,
        (first + 1 - zero) * scale * factor,
        (first + 2 - zero) * scale * factor,
        (first + 3 - zero) * scale * factor,
    )


@gluon.jit
def _each(rows, words):
    rows, _ = gl.broadcast(rows[:, None], words)
    return rows


@gluon.jit
def _integers(
    words, scales, zeros, factor, TILES: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """Planes of e4m3 bytes of the words of 128 inputs."""
    a, b, c, d = _table(words, scales, zeros, factor, 0, TILES, GROUPS, ZERO)
    e, f, g, h = a, b, c, d
    if GROUPS == 2:
        e, f, g, h = _table(words, scales, zeros, factor, 1, TILES, GROUPS, ZERO)
    return look_up(words, a, b, c, d, e, f, g, h)


@gluon.jit
def _floats(words, scales, largest, KIND: gl.constexpr):
    """Planes of e4m3 bytes of e2m1 codes, of which a plane is a block."""
    if KIND == _NVFP4:
        a, b, c, d = _nvfp4_eighths(scales)
    else:
        a = _mxfp4_factor(scales, largest, 0)
        b = _mxfp4_factor(scales, largest, 1)
        c = _mxfp4_factor(scales, largest, 2)
        d = _mxfp4_factor(scales, largest, 3)
    return _e2m1_times(words, a, b, c, d)


@gluon.jit
def _converted(
    codes, scales, zeros, of_rows, TILES: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 rows by 128 inputs, at most two, as bytes [64 * TILES, 128]."""
    ROWS: gl.constexpr = 64 * TILES
    if KIND == _NVFP4:
        layout: gl.constexpr = _HALF_ROW_WORDS if TILES == 2 else _FEW_HALF_ROW_WORDS
    else:
        layout: gl.constexpr = _ROW_WORDS if TILES == 2 else _FEW_ROW_WORDS
    words = codes.load(layout)
    if KIND == _INT4:
        a, b, c, d = _integers(words, scales, zeros, of_rows, TILES, GROUPS, ZERO)
    elif KIND == _NVFP4:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = scales._reinterpret(scales.dtype, [2 * ROWS], flat)
        a, b, c, d = _floats(words, scales.load(gl.SliceLayout(1, layout)), of_rows, KIND)
    else:
        scales = _group(scales, 0, TILES, 1, gl.SliceLayout(1, layout))
        a, b, c, d = _floats(words, scales, of_rows, KIND)
    made = four_side_by_side(a, b, c, d)
    if KIND == _NVFP4:
        made = made.reshape([TILES, 2, 64, 64]).permute((0, 2, 1, 3)).reshape([ROWS, 128])
    return made


@gluon.jit
def _of_rows(
    row_scale_ptr, column, first: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, n: gl.constexpr,
):  # fmt: skip
    """What converting needs of the rows from `first` on: factors of integers, the largest exponents
    of MXFP4."""
    layout: gl.constexpr = _ROW_WORDS if TILES == 2 else _FEW_ROW_WORDS
    each = first + gl.arange(0, 64 * TILES, gl.SliceLayout(1, layout))
    if GATED:
        each = each % (ROWS // 2) + each // (ROWS // 2) * n
    scale = gl.load(row_scale_ptr + column + each)
    found = 1.0 / scale
    if KIND != _INT4:
        found = (scale.to(gl.int32, bitcast=True) >> 23) + 6
    return found


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
    _, column, _, first, steps = _place(tile, tokens, COLUMNS, SPLITS, k)
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
    of_rows = _of_rows(row_scale_ptr, column, 0, TILES, ROWS, GATED, KIND, n)
    of_others = of_rows
    if ROWS == 256:
        of_others = _of_rows(row_scale_ptr, column, 128, TILES, ROWS, GATED, KIND, n)
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
            made = _converted(
                codes, scales, zeros, of_others if part else of_rows, TILES, KIND, GROUPS, ZERO
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
        token, column, _, first, steps = _place(tile, tokens, COLUMNS, SPLITS, k)
        at, next_tile, next_step = _convert_tile(
            x, packed, scale, zero, packed_piece, scale_piece, zero_piece, x_ring, w_ring,
            code_ring, scale_ring, zero_ring, coded, ready, free, row_scale_ptr, at, next_tile,
            next_step, token, column, first, steps, program, programs, tokens, tiles, whole,
            pieces, ROWS, ROWS, GATED, SPLITS, STAGES, AHEAD, KIND, GROUPS, ZERO, n, k,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < tiles:
        token, column, _, first, steps = _place(tile, tokens, COLUMNS, SPLITS, k)
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
            (_multiply, (
                x_ring, w_ring, ready, free, token_scale_ptr, row_scale_ptr, out_ptr, program,
                programs, tokens, tiles, whole, 0, pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
            (_multiply, (
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
    if out % 256 == 0 and out // 256 * token_tiles >= _MULTIPROCESSORS:
        return Config(method="hopper", rows=256, tokens=TOKENS, num_stages=3, unroll=3, pieces=2)
    programs = out // 128 * token_tiles
    parts = 1 if gated else max(1, min(_MULTIPROCESSORS // programs, _MOST_PARTS))
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
    whole, pieces = divide(tiles, _MULTIPROCESSORS, min(config.pieces, config.rows // narrowest))
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
        grid=(_MULTIPROCESSORS if whole else tiles * pieces,),
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
