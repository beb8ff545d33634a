"""Converts 4-bit codes in shared memory to the left operand of Hopper's tensor cores, in e4m3.

No data moves between threads. A register of the operand holds four inputs. Their order is free if
the tokens have the same order (`tokens.Order`). For NVFP4, one mask extracts four inputs from two
words at once. MXFP4's codes are looked up: see `hopper_mxfp4`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.quantized_matmul.e4m3.triton import nibble_bytes
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4

_INT4 = gl.constexpr(INT4.value)

_ROWS = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[8, 0], [16, 0]]
WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [0, 8], *_ROWS], _WARPS, [], [32, 16])
)
"""Layout of NVFP4's words of 64 inputs: a thread has four words, four threads have a row."""

_PLANES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16]], [[0, 4], [0, 8], *_ROWS], _WARPS, [], [32, 32]
    )
)
"""Layout of words of 128 inputs in which a plane of integers matches the left operand's
registers."""


@gluon.jit
def integer_planes(codes, part: gl.constexpr):
    """Converts words [64, 32] of 128 inputs to four planes of bytes [32, 32], for warpgroup
    `part`'s rows."""
    return nibble_bytes(codes.slice(part * 32, 32, dim=0).load(_PLANES))


@gluon.jit
def half_of_words(codes, part: gl.constexpr, half: gl.constexpr):
    """NVFP4's words [32, 16] of half of 128 inputs, for warpgroup `part`'s rows."""
    return codes.slice(half * 64 + part * 32, 32, dim=0).load(WORDS)


@gluon.jit
def scales_of(ring, stage, group: gl.constexpr, part: gl.constexpr):
    """Scales [32] of warpgroup `part`'s rows."""
    return ring.index(stage).slice(group * 64 + part * 32, 32).load(gl.SliceLayout(1, WORDS))


@gluon.jit
def of_rows(first, second, layout: gl.constexpr):
    """Joins values [32] of the rows of each half of the tile to [64], in the order of `operand`'s
    rows."""
    both = gl.join(first, second).reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])
    return gl.convert_layout(both, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def nvfp4_factors(scales):
    """Four e4m3 scales without sign, times 2^-8, as float16: first and third, then the others."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a; and.b32 a, $2, 0x007f007f; shl.b32 $0, a, 7;
        shr.u32 a, $2, 1; and.b32 $1, a, 0x3f803f80; }""",
        "=&r,=&r,r", [scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def e2m1_times(words, even, odd):
    """Converts four words to four registers of e4m3 bytes: e2m1 values times 32 times factors.

    even: float16 factors of the first and third nibble of each word; odd: of the other two.
    """
    even, _ = gl.broadcast(even[:, None], words)
    odd, _ = gl.broadcast(odd[:, None], words)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 few, many, up, e, o, x, y; .reg .b16 p, q;
        mov.b32 few, 0x52504c00; mov.b32 many, 0x5a585654;
        shl.b32 up, $4, 4;
        and.b32 e, up, 0x70707070; prmt.b32 x, few, many, e; mul.rn.f16x2 x, x, $6;
        shr.u32 e, e, 16; prmt.b32 y, few, many, e; mul.rn.f16x2 y, y, $6;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $0, up, 0x80808080, x, 0xea;
        and.b32 o, $4, 0x70707070; prmt.b32 x, few, many, o; mul.rn.f16x2 x, x, $10;
        shr.u32 o, o, 16; prmt.b32 y, few, many, o; mul.rn.f16x2 y, y, $10;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $1, $4, 0x80808080, x, 0xea;
        shl.b32 up, $5, 4;
        and.b32 e, up, 0x70707070; prmt.b32 x, few, many, e; mul.rn.f16x2 x, x, $6;
        shr.u32 e, e, 16; prmt.b32 y, few, many, e; mul.rn.f16x2 y, y, $6;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $2, up, 0x80808080, x, 0xea;
        and.b32 o, $5, 0x70707070; prmt.b32 x, few, many, o; mul.rn.f16x2 x, x, $10;
        shr.u32 o, o, 16; prmt.b32 y, few, many, o; mul.rn.f16x2 y, y, $10;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $3, $5, 0x80808080, x, 0xea; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [words, even, odd],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def operand(first, second, parts: gl.constexpr, layout: gl.constexpr, KIND: gl.constexpr):
    """Joins registers of 32 rows of each half of the tile, `parts` tensors [32, words] of each, to
    the left operand [64, parts * words]. Of a warp's 16 rows, 8 are of each half."""
    words: gl.constexpr = first[0].shape[1]
    both = gl.join(_joined(first, parts), _joined(second, parts))
    if KIND == _INT4:
        both = both.reshape([4, 8, words, parts, 2]).permute((0, 4, 1, 3, 2))
    else:
        both = both.reshape([4, 8, words // 4, 4, parts, 2]).permute((0, 5, 1, 4, 2, 3))
    both = both.reshape([64, parts * words]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def of_both(first, second, layout: gl.constexpr):
    """`operand` of MXFP4's codes that are `hopper_mxfp4.looked_up`, [32, 128] of each half."""
    both = gl.join(first, second).reshape([4, 8, 128, 2]).permute((0, 3, 1, 2))
    return gl.convert_layout(both.reshape([64, 128]), layout, assert_trivial=True)


@gluon.jit
def _joined(tensors, parts: gl.constexpr):
    if parts == 1:
        joined = tensors[0]
    elif parts == 2:
        joined = gl.join(tensors[0], tensors[1])
    else:
        joined = gl.join(gl.join(tensors[0], tensors[2]), gl.join(tensors[1], tensors[3]))
    return joined
