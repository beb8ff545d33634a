"""Products of many tokens in e4m3, at twice the tensor cores' rate for bfloat16.

Each token has one scale. 8-bit weights are e4m3 or int8; with int8 weights the tokens are int8 too.
4-bit weights are converted to e4m3 in registers. Integers convert exactly, because 0 to 15 times
e4m3's smallest number are all e4m3 numbers; their groups' scales and zeros are applied to the sums.
Floating-point codes are rounded together with their blocks' scales. With very many tokens the
conversion would be repeated too often, so `triton_convert.py` does it once, in a separate kernel.

For packed bytes, tokens are stored in the order of the bytes' inputs, for MXFP4 in that of its
planes. Products do not depend on it.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.e4m3.triton_convert import to_fp8
from jaxserve_kernels.quantized_matmul.triton import store_gated
from jaxserve_kernels.quantized_matmul.triton_arguments import (
    FP8,
    INT4,
    INT8,
    NO_ZERO,
    NVFP4,
    arrays,
    kind,
)
from jaxserve_kernels.quantized_matmul.triton_unpack import (
    each,
    four_side_by_side,
    largest_exponent,
    power,
    side_by_side,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Quantized


@triton.jit
def nibble_bytes(words):
    """Splits words into four planes of bytes. Read as e4m3, a byte is its nibble times 2^-9."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b;
        prmt.b32 a, $4, $5, 0x6420; prmt.b32 b, $4, $5, 0x7531;
        and.b32 $0, a, 0x0f0f0f0f; shr.u32 a, a, 4; and.b32 $1, a, 0x0f0f0f0f;
        and.b32 $2, b, 0x0f0f0f0f; shr.u32 b, b, 4; and.b32 $3, b, 0x0f0f0f0f; }""",
        "=&r,=&r,=&r,=&r,r,r", [words],
        dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def nvfp4_eighths(words):
    """An eighth of each of four e4m3 scales without sign, as float16 in both halves of a word.

    Converts two at a time: exponent and mantissa move to their places in float16, which gives a
    number that is 2^8 too small.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, big; mov.b32 big, 0x50005000;
        and.b32 a, $4, 0x007f007f; shl.b32 a, a, 7; mul.rn.f16x2 a, a, big;
        shr.u32 b, $4, 1; and.b32 b, b, 0x3f803f80; mul.rn.f16x2 b, b, big;
        prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, b, b, 0x1010;
        prmt.b32 $2, a, a, 0x3232; prmt.b32 $3, b, b, 0x3232; }""",
        "=&r,=&r,=&r,=&r,r", [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_bytes(words, a, b, c, d):
    """Converts 16-bit words to four vectors of e4m3 bytes: e2m1 values times float16 factors, one
    for each plane and each four words.

    Converts four lanes at a time. A nibble without its sign selects a byte from a table: the high
    byte of the magnitude as float16, whose low byte is 0. Signs are added to the rounded bytes.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 few, many, m, h0, h1, h2, h3, low, high, x, y; .reg .b16 p, q;
        mov.b32 few, 0x3e3c3800; mov.b32 many, 0x46444240;
        and.b32 m, $4, 0x77777777; prmt.b32 h0, few, many, m;
        shr.u32 m, m, 16; prmt.b32 h1, few, many, m;
        and.b32 m, $5, 0x77777777; prmt.b32 h2, few, many, m;
        shr.u32 m, m, 16; prmt.b32 h3, few, many, m;
        prmt.b32 low, $4, $5, 0x6420; prmt.b32 high, $4, $5, 0x7531;
        prmt.b32 x, h0, h1, 0x4808; mul.rn.f16x2 x, x, $6;
        prmt.b32 y, h2, h3, 0x4808; mul.rn.f16x2 y, y, $6;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; shl.b32 y, low, 4; lop3.b32 $0, y, 0x80808080, x, 0xea;
        prmt.b32 x, h0, h1, 0x5818; mul.rn.f16x2 x, x, $10;
        prmt.b32 y, h2, h3, 0x5818; mul.rn.f16x2 y, y, $10;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $1, low, 0x80808080, x, 0xea;
        prmt.b32 x, h0, h1, 0x6828; mul.rn.f16x2 x, x, $14;
        prmt.b32 y, h2, h3, 0x6828; mul.rn.f16x2 y, y, $14;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; shl.b32 y, high, 4; lop3.b32 $2, y, 0x80808080, x, 0xea;
        prmt.b32 x, h0, h1, 0x7838; mul.rn.f16x2 x, x, $18;
        prmt.b32 y, h2, h3, 0x7838; mul.rn.f16x2 y, y, $18;
        cvt.rn.satfinite.e4m3x2.f16x2 p, x; cvt.rn.satfinite.e4m3x2.f16x2 q, y;
        mov.b32 x, {p, q}; lop3.b32 $3, high, 0x80808080, x, 0xea; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, a, b, c, d],
        dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _side_by_side(a, b, c, d):
    return four_side_by_side(a, b, c, d).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _int4_group(acc, codes, x, scale_ptr):
    """Adds a group. `codes` are the integers times 2^-9; `_less_zeros` subtracts the zero
    points."""
    part = tl.dot(codes.to(tl.float8e4nv, bitcast=True), tl.load(x))
    return acc + part * tl.load(scale_ptr)[:, None]


@triton.jit
def _int4_tile(acc, words, x, scale_ptr, GROUP: tl.constexpr):
    a, b, c, d = nibble_bytes(words)
    if GROUP == 128:
        acc = _int4_group(acc, four_side_by_side(a, b, c, d), x, scale_ptr)
    elif GROUP == 64:
        acc = _int4_group(acc, side_by_side(a, b), x, scale_ptr)
        acc = _int4_group(acc, side_by_side(c, d), x + 64, scale_ptr + 64)
    else:
        acc = _int4_group(acc, a, x, scale_ptr)
        acc = _int4_group(acc, b, x + 32, scale_ptr + 64)
        acc = _int4_group(acc, c, x + 64, scale_ptr + 128)
        acc = _int4_group(acc, d, x + 96, scale_ptr + 192)
    return acc


@triton.jit
def _bf16(x):
    return x.to(tl.bfloat16)


@triton.jit
def _less_zeros(
    acc, scale_ptr, zero_ptr, sum_ptr, padded, GROUPS: tl.constexpr, ZERO: tl.constexpr
):
    """acc minus each group's scale * zero times the tokens' sums, as one small product.

    The pointers point to the first of GROUPS groups, of rows and of tokens.
    """
    for first in tl.static_range(0, GROUPS, 32):
        group = first + tl.arange(0, 32)
        known = group < GROUPS
        at = group[None, :] * 64
        scale = tl.load(scale_ptr[:, None] + at, mask=known[None, :], other=0.0)
        zero = 8.0
        if ZERO != NO_ZERO:
            zero = tl.load(zero_ptr[:, None] + at, mask=known[None, :], other=0.0).to(tl.float32)
        sums = tl.load(sum_ptr[None, :] + group[:, None] * padded, mask=known[:, None], other=0.0)
        acc -= tl.dot(_bf16(scale * zero), _bf16(sums))
    return acc


@triton.jit
def _nvfp4_tile(acc, words, x, scale_ptr):
    """Adds a tile. A plane is a block. Its values are divided by 8 to fit e4m3; `_accumulate`
    multiplies the sums by 8."""
    a, b, c, d = nvfp4_eighths(tl.load(scale_ptr))
    shape: tl.constexpr = words.shape
    a, b, c, d = e2m1_bytes(words, each(a, shape), each(b, shape), each(c, shape), each(d, shape))
    return tl.dot(_side_by_side(a, b, c, d), tl.load(x), acc)


@triton.jit
def _mxfp4_tile(acc, words, x, scale_ptr):
    """Adds a tile. Eight words are a block. The sums are multiplied by the largest block's power of
    two, and codes by the other blocks' powers relative to it. That is exact in e4m3 if the powers
    are within 2 ** 14 of each other.

    Exponents are loaded once more, one by one: the compiler can load them in any layout, but it
    would not compute which block a word is of in the operand's layout.
    """
    rows: tl.constexpr = words.shape[0]
    largest = largest_exponent(tl.load(scale_ptr))
    bytes_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
    exponents = tl.load(bytes_ptr[:, None] + tl.arange(0, 4)[None, :])
    # 64 times the powers relative to the largest one, as float16 in both halves of words; 0 if too
    # small for float16.
    factors = tl.maximum(exponents.to(tl.int32) - largest[:, None] + (15 + 6), 0) * 0x04000400
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], (rows, 4, 8)), words.shape)
    a, b, c, d = e2m1_bytes(words, factors, factors, factors, factors)
    part = tl.dot(_side_by_side(a, b, c, d), tl.load(x))
    return acc + part * power(tl.maximum(largest - 6, 0))[:, None]


@triton.jit
def _accumulate(
    x_ptr, token_scale_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, row, token, first,
    tokens, padded, steps: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight rows `row` times the tokens `token` over `steps` tiles of inputs from `first`.

    second_ptr: zero points of INT4, scales per row of NVFP4. GROUP: inputs per scale.
    """
    depth: tl.constexpr = 64 if KIND == NVFP4 else 128
    width: tl.constexpr = depth // 4 if KIND >= INT4 else depth
    tiles: tl.constexpr = k // depth
    groups: tl.constexpr = depth // GROUP if KIND <= INT4 else 1
    tile = (row // 64).to(tl.int64)
    inner = row % 64
    start = tile * tiles + first
    if KIND <= FP8:
        packed_ptr = packed_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty))
    weight = packed_ptr + start * (64 * width) + inner * width
    weight = weight[:, None] + tl.arange(0, width)[None, :]
    span: tl.constexpr = GROUP if KIND == INT4 else depth  # inputs of one product
    x = x_ptr + token.to(tl.int64)[None, :] * k + first * depth + tl.arange(0, span)[:, None]
    scale_at = scale_ptr + start * (64 * groups) + inner
    sums: tl.constexpr = tl.int32 if KIND == INT8 else tl.float32
    acc = tl.zeros([row.shape[0], token.shape[0]], sums if groups == 0 else tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        codes = tl.load(weight)
        if KIND == INT4:
            acc = _int4_tile(acc, codes, x, scale_at, GROUP)
        elif KIND == NVFP4:
            acc = _nvfp4_tile(acc, codes, x, scale_at)
        elif KIND > NVFP4:
            acc = _mxfp4_tile(acc, codes, x, scale_at)
        elif groups == 0:
            acc = tl.dot(codes, tl.load(x), acc, out_dtype=sums)
        else:
            part = tl.dot(codes, tl.load(x), out_dtype=sums).to(tl.float32)
            acc += part * tl.load(scale_at)[:, None]
        weight += 64 * width
        x += depth
        scale_at += 64 * groups
    if KIND == INT4:
        at = start * (64 * groups) + inner
        acc = _less_zeros(
            acc * 512.0, scale_ptr + at, second_ptr + at, sum_ptr + first * groups * padded + token,
            padded, steps * groups, ZERO,
        )  # fmt: skip
    elif KIND == NVFP4:
        acc *= (8.0 * tl.load(second_ptr + row))[:, None]
    elif groups == 0:
        acc = acc.to(tl.float32) * tl.load(scale_ptr + row)[:, None]
    return acc * tl.load(token_scale_ptr + token, mask=token < tokens, other=0.0)[None, :]


@triton.jit
def _product(
    x_ptr, token_scale_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, tokens, padded, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GATED: a tile is ROWS / 2 rows of gate and the same rows of up; n is half the weight's.

    Programs of the same rows run side by side, so that a weight is read from memory once.
    """
    split = tl.program_id(1)
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    if GATED:
        row = tl.program_id(2) * half + lane % half + (lane // half) * n
    else:
        row = tl.program_id(2) * ROWS + lane
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // (64 if KIND == NVFP4 else 128) // SPLITS
    acc = _accumulate(
        x_ptr, token_scale_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, row, token,
        split * steps, tokens, padded, steps, k, KIND, GROUP, ZERO, STAGES,
    )  # fmt: skip
    if GATED:
        row = tl.program_id(2) * half + tl.arange(0, half)
        store_gated(acc, out_ptr, row, token, tokens, n, half, TOKENS, GATED)
    else:
        out = out_ptr + (split * tokens + token[None, :]).to(tl.int64) * n + row[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=token[None, :] < tokens)


def launch(
    x: QuantizedTokens,
    weight: Quantized,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    padded = x.codes.shape[0]
    if config.beforehand:
        weight = to_fp8(weight, target=target)
    return triton_call(
        *x, *arrays(weight), tokens, padded,
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_e4m3_{type(weight).__name__}",
        target=target,
        out_type=out_type,
        grid=(padded // config.tokens, config.splits, weight.shape[0] // config.rows),
        num_warps=config.num_warps,
        n=out_type.shape[-1], k=k, GATED=gating(activation, gated=gated), **kind(weight),
        TOKENS=config.tokens, ROWS=config.rows, SPLITS=config.splits, STAGES=config.num_stages,
    )  # fmt: skip
