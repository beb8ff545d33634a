"""Converts weight codes to bfloat16 in registers, two at once with a few bitwise instructions.

Each function keeps the order of elements, so it works with any layout of the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO

MXFP4_POWER = tl.constexpr(2.0**64)
"""MXFP4's powers of two are divided by this one. So bfloat16 represents a block's values times its
power exactly if the power is from 2^-68 to 2^65. Smaller products are rounded; no weight has a
larger power."""


@triton.jit
def nibbles(words):
    """Converts 16-bit words to four bfloat16 vectors: nibbles times 2^-133, 2^-129, 2^-133, 2^-129.

    Below 2^-125 bfloat16's numbers are evenly spaced, so the low byte can be read as an integer.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 high; shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, high, 0x000f000f; and.b32 $3, high, 0x00f000f0; }""",
        "=&r,=&r,=&r,=&r,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def nibbles_and_biased(words):
    """Like `nibbles`, but the even planes are 2 + nibble / 64: that takes no further instruction,
    if who multiplies takes 2 from the sums. 0x4000 is 2."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 high; shr.u32 high, $4, 8;
        lop3.b32 $0, $4, 0x000f000f, 0x40004000, 0xea; and.b32 $1, $4, 0x00f000f0;
        lop3.b32 $2, high, 0x000f000f, 0x40004000, 0xea; and.b32 $3, high, 0x00f000f0; }""",
        "=&r,=&r,=&r,=&r,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def low_less_8(values):
    """Returns (nibble - 8) / 64 for an even plane, exactly. 0x7f00 is 2^127, 0xbe00 is -1 / 8."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 factor, offset; mov.b32 factor, 0x7f007f00; mov.b32 offset, 0xbe00be00;
        fma.rn.bf16x2 $0, $1, factor, offset; }""",
        "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def high_less_8(values):
    """Returns (nibble - 8) / 64 for an odd plane, exactly. 0x7d00 is 2^123."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 factor, offset; mov.b32 factor, 0x7d007d00; mov.b32 offset, 0xbe00be00;
        fma.rn.bf16x2 $0, $1, factor, offset; }""",
        "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def low_plus(values, offset):
    """Returns nibble / 64 + offset for an even plane."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 factor; mov.b32 factor, 0x7f007f00; fma.rn.bf16x2 $0, $1, factor, $2; }",
        "=r,r,r", [values, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def high_plus(values, offset):
    """Returns nibble / 64 + offset for an odd plane."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 factor; mov.b32 factor, 0x7d007d00; fma.rn.bf16x2 $0, $1, factor, $2; }",
        "=r,r,r", [values, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def nvfp4_factors(words):
    """Converts four e4m3 scales without sign, times 2^118, to bfloat16. The first result has the
    first and the third scale as halves of a word, the second result the others.

    Converts two at a time. Exponent and mantissa move to bfloat16's places, which gives a number
    that is 2^120 too small. It is multiplied by 2^127, and 111 is added to its exponent. So 0
    becomes 2^-16; products with it in `e2m1_times` round to 0.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, big, zero; mov.b32 big, 0x7f007f00; mov.b32 zero, 0x80008000;
        shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0; fma.rn.bf16x2 a, a, big, zero;
        shr.u32 b, $2, 4; and.b32 b, b, 0x07f007f0; fma.rn.bf16x2 b, b, big, zero;
        add.u32 $0, a, 0x37803780; add.u32 $1, b, 0x37803780; }""",
        "=&r,=&r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_times(words, even, odd):
    """Converts 16-bit words to four bfloat16 vectors: e2m1 values times 2^-126 times factors, one
    for each plane and each two words.

    `even` has the factors of planes 0 and 2 as halves of a word, `odd` those of planes 1 and 3. A
    product takes either half for both of its numbers, without a further instruction.

    A nibble's sign, exponent and mantissa move to bfloat16's places. One integer product copies the
    nibble to both places, and a mask keeps the right bits. The result is the value times 2^-126.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, f, high, zero; .reg .b16 e, g, o, p; mov.b32 zero, 0x80008000;
        mov.b32 {e, g}, $5; mov.b32 {o, p}, $7; shr.u32 high, $4, 8;
        and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        mov.b32 f, {e, e}; fma.rn.bf16x2 $0, a, f, zero;
        and.b32 a, $4, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        mov.b32 f, {o, o}; fma.rn.bf16x2 $1, a, f, zero;
        and.b32 a, high, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        mov.b32 f, {g, g}; fma.rn.bf16x2 $2, a, f, zero;
        and.b32 a, high, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        mov.b32 f, {p, p}; fma.rn.bf16x2 $3, a, f, zero; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, even, odd],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def e2m1_of_blocks(first, second, factors):
    """`e2m1_times` of words [rows, n] of two blocks, each with one factor for all planes: the low
    halves of `factors` [rows] for the first, the high halves for the second. Returns four planes of
    the first, then of the second."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, f, high, zero; .reg .b16 e, g; mov.b32 zero, 0x80008000;
        mov.b32 {e, g}, $10; mov.b32 f, {e, e}; shr.u32 high, $8, 8;
        and.b32 a, $8, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $0, a, f, zero;
        and.b32 a, $8, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $1, a, f, zero;
        and.b32 a, high, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $2, a, f, zero;
        and.b32 a, high, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $3, a, f, zero;
        mov.b32 f, {g, g}; shr.u32 high, $9, 8;
        and.b32 a, $9, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $4, a, f, zero;
        and.b32 a, $9, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $5, a, f, zero;
        and.b32 a, high, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $6, a, f, zero;
        and.b32 a, high, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $7, a, f, zero; }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [first, second, each(factors, first.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def int8_pair(words):
    """Converts the low and the high bytes of 16-bit words, as int8, to two bfloat16 vectors.

    0x4300 with the byte's low seven bits is 128 plus those bits. 0x4300 with its sign bit is 256 if
    that is set, else 128. The difference is the number.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, minus; mov.b32 minus, 0xbf80bf80;
        lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
        shr.u32 c, $2, 8; fma.rn.bf16x2 $0, b, minus, a;
        lop3.b32 a, c, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 b, c, 0x00800080, 0x43004300, 0xea;
        fma.rn.bf16x2 $1, b, minus, a; }""",
        "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def e4m3_pair(words):
    """Converts the low and the high bytes of 16-bit words, as e4m3, to two bfloat16 vectors.

    Exponent and mantissa move to bfloat16's places; a product by 2^120 corrects the exponent.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, big, zero; mov.b32 big, 0x7b807b80; mov.b32 zero, 0x80008000;
        shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0; shl.b32 b, $2, 8;
        lop3.b32 a, b, 0x80008000, a, 0xea; fma.rn.bf16x2 $0, a, big, zero;
        shr.u32 a, $2, 4; and.b32 a, a, 0x07f007f0;
        lop3.b32 a, $2, 0x80008000, a, 0xea; fma.rn.bf16x2 $1, a, big, zero; }""",
        "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def side_by_side(a, b):
    """Joins two [rows, n] to [rows, 2 n]; in registers, if each thread has its part of both."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def four_side_by_side(a, b, c, d):
    """Joins four [rows, n] to [rows, 4 n], like `side_by_side`."""
    four = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(four, (a.shape[0], 4 * a.shape[1]))


@triton.jit
def four_apart(values):
    """The inverse of `four_side_by_side`."""
    shape: tl.constexpr = (values.shape[0], 2, 2, values.shape[1] // 4)
    first, second = tl.split(tl.permute(tl.reshape(values, shape), (0, 3, 2, 1)))
    a, b = tl.split(first)
    c, d = tl.split(second)
    return a, b, c, d


@triton.jit
def each(rows, shape: tl.constexpr):
    """Broadcasts [rows] to [rows, n], or [warps, rows] to [warps, rows, n]."""
    return tl.broadcast_to(tl.expand_dims(rows, len(rows.shape)), shape)


@triton.jit
def column(rows, shape: tl.constexpr):
    """`each`, as bfloat16."""
    return each(rows.to(tl.bfloat16), shape)


@triton.jit
def less_zero(values, zero, PLANE: tl.constexpr, ZERO: tl.constexpr):
    """Returns (nibble - zero) / 64 for a plane of `nibbles`; exact if zeros are integers."""
    if ZERO == NO_ZERO:
        values = high_less_8(values) if PLANE % 2 else low_less_8(values)
    else:
        offset = column(zero.to(tl.float32) * -0.015625, values.shape)
        values = high_plus(values, offset) if PLANE % 2 else low_plus(values, offset)
    return values


@triton.jit
def e4m3_byte(words, byte: tl.constexpr):
    """Converts one byte of 32-bit words, as e4m3 without sign, to float32."""
    bits = ((words >> (8 * byte)) & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def power(exponent):
    """2 ** (exponent - 127) in float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest_exponent(words):
    """Returns the largest of the four exponents in each word, int32."""
    low = tl.maximum(words & 0xFF, (words >> 8) & 0xFF)
    return tl.maximum(low, tl.maximum((words >> 16) & 0xFF, words >> 24)).to(tl.int32)


@triton.jit
def mxfp4_factors(words):
    """Converts four E8M0 exponents to powers of two, divided by `MXFP4_POWER` and times 2^126, in
    bfloat16. The first result has the first and the third as halves of a word, the second the
    others.

    A power of 2^65 then has the exponent 254, the largest of bfloat16's.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, none; mov.b32 none, 0;
        prmt.b32 a, $2, none, 0x4240; prmt.b32 b, $2, none, 0x4341;
        mul.lo.u32 a, a, 128; mul.lo.u32 b, b, 128;
        add.u32 $0, a, 0x1f001f00; add.u32 $1, b, 0x1f001f00; }""",
        "=&r,=&r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def mxfp4_planes(words, scales):
    """Converts MXFP4's words [rows, 32], `four_apart`, to four bfloat16 planes, divided by
    `MXFP4_POWER`. `scales`: a word of exponents for each row.

    A register has words of one block. So a thread needs as many instructions as if a plane were a
    block.
    """
    even, odd = mxfp4_factors(scales)
    x = e2m1_of_blocks(words[0], words[2], even)
    y = e2m1_of_blocks(words[1], words[3], odd)
    return (
        four_side_by_side(x[0], y[0], x[4], y[4]), four_side_by_side(x[1], y[1], x[5], y[5]),
        four_side_by_side(x[2], y[2], x[6], y[6]), four_side_by_side(x[3], y[3], x[7], y[7]),
    )  # fmt: skip
