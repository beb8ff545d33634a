"""Codes of 4 bits in shared memory to bytes of e4m3, in the order of the weight's inputs.

A warpgroup takes 64 or 128 rows at a time, a thread half a row or a row of 128 inputs, whose codes
and bytes lie side by side, so that both move as whole vectors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.quantized_matmul.e4m3.triton import (
    e2m1_bytes,
    mxfp4_half_factor,
    nvfp4_eighths,
)
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, NVFP4
from jaxserve_kernels.quantized_matmul.triton_unpack import four_side_by_side

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

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
        a, b, c, d = nvfp4_eighths(scales)
    else:
        a = mxfp4_half_factor(scales, largest, 0)
        b = mxfp4_half_factor(scales, largest, 1)
        c = mxfp4_half_factor(scales, largest, 2)
        d = mxfp4_half_factor(scales, largest, 3)
    return e2m1_bytes(words, a, b, c, d)


@gluon.jit
def converted(
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
def of_rows(
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
