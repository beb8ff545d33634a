"""Converts weight codes to bfloat16 in registers, two at once with a few bitwise instructions.

Each function keeps the order of elements, so it works with any layout of the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO

MXFP4_POWER = tl.constexpr(2.0**64)
"""MXFP4's powers of two are taken relative to this one. So bfloat16 has a block's values times its
power exactly if that is from 2^-68 to 2^65. Smaller products are rounded; no weight has a larger
power."""


@triton.jit
def nibbles(words):
    """16-bit words to four bfloat16 vectors: their nibbles times 2^-133, 2^-129, 2^-133, 2^-129.

    Below 2^-125 bfloat16's numbers are evenly spaced, so that any bits of a lower byte are one.
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
    """(nibble - 8) / 64 of an even plane, exactly: 0x7f00 is 2^127, 0xbe00 is -1 / 8."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 factor, offset; mov.b32 factor, 0x7f007f00; mov.b32 offset, 0xbe00be00;
        fma.rn.bf16x2 $0, $1, factor, offset; }""",
        "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def high_less_8(values):
    """The same of an odd plane: 0x7d00 is 2^123."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 factor, offset; mov.b32 factor, 0x7d007d00; mov.b32 offset, 0xbe00be00;
        fma.rn.bf16x2 $0, $1, factor, offset; }""",
        "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def low_plus(values, offset):
    """nibble / 64 + offset of an even plane."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 factor; mov.b32 factor, 0x7f007f00; fma.rn.bf16x2 $0, $1, factor, $2; }",
        "=r,r,r", [values, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def high_plus(values, offset):
    """The same of an odd plane."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 factor; mov.b32 factor, 0x7d007d00; fma.rn.bf16x2 $0, $1, factor, $2; }",
        "=r,r,r", [values, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def nvfp4_factors(words):
    """Four e4m3 scales without sign, times 2^118, as bfloat16: the first and the third in one
    result, the others in the second.

    Two at a time: exponent and mantissa go where bfloat16 has them (a number 2^120 too small),
    times 2^127, and 111 more in the exponent. So 0 becomes 2^-16: `e2m1_times` takes it as 0.
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
    """16-bit words to four bfloat16 vectors of e2m1 values, times 2^-126 and a factor each.

    even has the factors of planes 0 and 2, odd those of planes 1 and 3, as the halves of a word. A
    product takes either half for both of its numbers, without a further instruction.

    A nibble's sign, exponent and mantissa go where bfloat16 has them: one product puts the nibble
    at both places, a mask takes what is meant. That is the value times 2^-126.
    """
    shape: tl.constexpr = words.shape
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
        "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, each(even, shape), each(odd, shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def int8_pair(words):
    """16-bit words to two bfloat16 vectors, of their low and of their high bytes as int8.

    The low seven bits on 0x4300 are 128 + them; the sign bit on 0x4300 is 256 if set, else 128;
    the difference is the number.
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
    """16-bit words to two bfloat16 vectors, of their low and of their high bytes as e4m3.

    Exponent and mantissa go where bfloat16 has them (a number 2^120 too small), then one product.
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
    """[rows, n] twice to [rows, 2 n]; in registers, where each thread has its part of both."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def four_side_by_side(a, b, c, d):
    """[rows, n] four times to [rows, 4 n], as `side_by_side`."""
    four = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(four, (a.shape[0], 4 * a.shape[1]))


@triton.jit
def each(rows, shape: tl.constexpr):
    """[rows] for each element of [rows, n], [warps, rows] for each of [warps, rows, n]."""
    return tl.broadcast_to(tl.expand_dims(rows, len(rows.shape)), shape)


@triton.jit
def column(rows, shape: tl.constexpr):
    """`each`, as bfloat16."""
    return each(rows.to(tl.bfloat16), shape)


@triton.jit
def less_zero(values, zero, PLANE: tl.constexpr, ZERO: tl.constexpr):
    """(nibble - zero) / 64 of a plane of `nibbles`; exactly, where zeros are whole."""
    if ZERO == NO_ZERO:
        values = high_less_8(values) if PLANE % 2 else low_less_8(values)
    else:
        offset = column(zero.to(tl.float32) * -0.015625, values.shape)
        values = high_plus(values, offset) if PLANE % 2 else low_plus(values, offset)
    return values


@triton.jit
def e4m3_byte(words, byte: tl.constexpr):
    """float32 of one byte of 32-bit words, as e4m3 without sign."""
    bits = ((words >> (8 * byte)) & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def power(exponent):
    """2 ** (exponent - 127) in float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest_exponent(words):
    """Of the four in each word: int32."""
    low = tl.maximum(words & 0xFF, (words >> 8) & 0xFF)
    return tl.maximum(low, tl.maximum((words >> 16) & 0xFF, words >> 24)).to(tl.int32)


@triton.jit
def mxfp4_factors(words):
    """Four E8M0 exponents to powers of two relative to `MXFP4_POWER`, times 2^126, as bfloat16: the
    first and the third in one result, the others in the second.

    A power up to 2^65 has an exponent of up to 254 then, the largest that bfloat16 has.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, none; mov.b32 none, 0;
        prmt.b32 a, $2, none, 0x4240; prmt.b32 b, $2, none, 0x4341;
        mul.lo.u32 a, a, 128; mul.lo.u32 b, b, 128;
        add.u32 $0, a, 0x1f001f00; add.u32 $1, b, 0x1f001f00; }""",
        "=&r,=&r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
