"""Products of tokens with weights that are unpacked in registers, on the way to the tensor cores.

The weight is the left operand: its codes go from memory to shared memory to registers, where a few
bitwise instructions make bfloat16 numbers of two codes at once, in the order in which the tensor
cores take them. No number passes through shared memory a second time. Programs share the rows of a
tile by splitting the input dimension; their float32 partial sums are added by whoever reads them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    QuantizedWeight,
)

INT8: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)  # from here on: 4-bit codes
NVFP4: tl.constexpr = tl.constexpr(3)
MXFP4: tl.constexpr = tl.constexpr(4)

NO_ZERO: tl.constexpr = tl.constexpr(0)
WHOLE_ZERO: tl.constexpr = tl.constexpr(1)
ANY_ZERO: tl.constexpr = tl.constexpr(2)


@triton.jit
def _nibbles(words):
    """16-bit words to four bfloat16 vectors of 128 + nibble: 0x4300 is 128, its last bit is 1."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c;
        shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea; }""",
        "=r,=r,=r,=r,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _less_136(values):
    """128 + nibble to nibble - 8, exactly: 0x3f80 is 1, 0xc308 is -136."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 one, offset; mov.b32 one, 0x3f803f80; mov.b32 offset, 0xc308c308;
        fma.rn.bf16x2 $0, $1, one, offset; }""",
        "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _plus(values, offset):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",
        "=r,r,r", [values, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _nvfp4_factors(words):
    """Four e4m3 scales without sign, times 2^118: each as bfloat16 in both halves of a word.

    Two at a time: exponent and mantissa go where bfloat16 has them (a number 2^120 too small),
    times 2^127, and 111 more in the exponent. So 0 becomes 2^-16: `_e2m1_times` takes it as 0.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, big, zero; mov.b32 big, 0x7f007f00; mov.b32 zero, 0x80008000;
        shl.b32 a, $4, 4; and.b32 a, a, 0x07f007f0; fma.rn.bf16x2 a, a, big, zero;
        shr.u32 b, $4, 4; and.b32 b, b, 0x07f007f0; fma.rn.bf16x2 b, b, big, zero;
        add.u32 a, a, 0x37803780; add.u32 b, b, 0x37803780;
        prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, b, b, 0x1010;
        prmt.b32 $2, a, a, 0x3232; prmt.b32 $3, b, b, 0x3232; }""",
        "=&r,=&r,=&r,=&r,r", [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _e2m1_times(words, a, b, c, d):
    """16-bit words to four bfloat16 vectors of e2m1 values, times 2^-126 and a factor each.

    A nibble's sign, exponent and mantissa go where bfloat16 has them: one product puts the nibble
    at both places, a mask takes what is meant. That is the value times 2^-126.
    """
    shape: tl.constexpr = words.shape
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, high, zero; mov.b32 zero, 0x80008000; shr.u32 high, $4, 8;
        and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $0, a, $5, zero;
        and.b32 a, $4, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $1, a, $7, zero;
        and.b32 a, high, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $2, a, $9, zero;
        and.b32 a, high, 0x00f000f0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81c081c0;
        fma.rn.bf16x2 $3, a, $11, zero; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [words, each(a, shape), each(b, shape), each(c, shape), each(d, shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _int8_pair(words):
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
def _e4m3_pair(words):
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
    four = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(four, (a.shape[0], 4 * a.shape[1]))


@triton.jit
def each(rows, shape: tl.constexpr):
    """[rows] for each element of [rows, n]."""
    return tl.broadcast_to(rows[:, None], shape)


@triton.jit
def _column(rows, shape: tl.constexpr):
    """[rows] as bfloat16 for each element of [rows, n]."""
    return tl.broadcast_to(rows.to(tl.bfloat16)[:, None], shape)


@triton.jit
def _less_zero(values, zero, ZERO: tl.constexpr):
    """128 + nibble to nibble - zero; exactly, where zeros are whole."""
    if ZERO == NO_ZERO:
        return _less_136(values)
    if ZERO == WHOLE_ZERO:
        return _plus(values, _column(-128.0 - zero.to(tl.float32), values.shape))
    values = _plus(values, tl.full(values.shape, -128.0, tl.bfloat16))
    return _plus(values, _column(-zero, values.shape))


@triton.jit
def _int4_tile(
    acc, words, x, present, scale_ptr, zero_ptr, GROUP: tl.constexpr, ZERO: tl.constexpr
):
    """x, scale_ptr and zero_ptr are at the tile's first group of inputs."""
    a, b, c, d = _nibbles(words)
    if GROUP == 128:
        acc = _int4_group(acc, four_side_by_side(a, b, c, d), x, present, scale_ptr, zero_ptr, ZERO)
    elif GROUP == 64:
        acc = _int4_group(acc, side_by_side(a, b), x, present, scale_ptr, zero_ptr, ZERO)
        acc = _int4_group(
            acc, side_by_side(c, d), x + 64, present, scale_ptr + 64, zero_ptr + 64, ZERO
        )
    else:
        acc = _int4_group(acc, a, x, present, scale_ptr, zero_ptr, ZERO)
        acc = _int4_group(acc, b, x + 32, present, scale_ptr + 64, zero_ptr + 64, ZERO)
        acc = _int4_group(acc, c, x + 64, present, scale_ptr + 128, zero_ptr + 128, ZERO)
        acc = _int4_group(acc, d, x + 96, present, scale_ptr + 192, zero_ptr + 192, ZERO)
    return acc


@triton.jit
def _int4_group(acc, values, x, present, scale_ptr, zero_ptr, ZERO: tl.constexpr):
    values = _less_zero(values, tl.load(zero_ptr), ZERO)
    part = tl.dot(values, tl.load(x, mask=present, other=0.0))
    return acc + part * tl.load(scale_ptr)[:, None]


@triton.jit
def e4m3_byte(words, byte: tl.constexpr):
    """float32 of one byte of 32-bit words, as e4m3 without sign."""
    bits = ((words >> (8 * byte)) & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _nvfp4_tile(acc, words, inputs, scale_ptr, row_scale):
    """A plane is a block; its values times its scale are exact: 2 and 4 significant bits.

    They are 2^-8 of what they mean; row_scale makes up for it.
    """
    a, b, c, d = _nvfp4_factors(tl.load(scale_ptr))
    a, b, c, d = _e2m1_times(words, a, b, c, d)
    return acc + tl.dot(four_side_by_side(a, b, c, d), inputs) * row_scale[:, None]


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
def _mxfp4_factor(words, largest, block: tl.constexpr):
    """2^126 times the block's power over the largest, as bfloat16 in both halves of a word."""
    exponent = ((words >> (8 * block)) & 0xFF).to(tl.int32)
    return tl.maximum(exponent - largest + 253, 0) * 0x00800080


@triton.jit
def _mxfp4_tile(acc, words, inputs, scale_ptr):
    """A plane is a block. The largest one's power goes onto the sums, the others' relative to it:
    a block of zeros may have any."""
    scales = tl.load(scale_ptr)
    largest = largest_exponent(scales)
    a, b, c, d = _e2m1_times(
        words,
        _mxfp4_factor(scales, largest, 0),
        _mxfp4_factor(scales, largest, 1),
        _mxfp4_factor(scales, largest, 2),
        _mxfp4_factor(scales, largest, 3),
    )
    return acc + tl.dot(four_side_by_side(a, b, c, d), inputs) * power(largest)[:, None]


@triton.jit
def _bytes_tile(acc, words, inputs, scale, KIND: tl.constexpr):
    if KIND == INT8:
        low, high = _int8_pair(words)
    else:
        low, high = _e4m3_pair(words)
    return acc + tl.dot(side_by_side(low, high), inputs) * scale[:, None]


@triton.jit
def _accumulate(
    x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, first,
    tokens, steps: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight rows `row` times the tokens `token` over `steps` tiles of inputs from `first`.

    second_ptr: zero points of INT4, scales per row of NVFP4. GROUP: inputs per scale of the kinds
    that have float32 scales; k where a row has one.

    Every tile's sums are scaled on their way to `acc`: a product right into `acc` would make the
    tensor cores wait for each other, since registers feed them.
    """
    depth: tl.constexpr = 64 if KIND == NVFP4 else 128
    width: tl.constexpr = depth // 4 if KIND >= INT4 else depth // 2
    tiles: tl.constexpr = k // depth
    groups: tl.constexpr = depth // GROUP if KIND <= INT4 else 1
    tile = (row // 64).to(tl.int64)
    inner = row % 64
    words = packed_ptr + (tile * tiles + first) * (64 * width) + inner * width
    words = words[:, None] + tl.arange(0, width)[None, :]
    span: tl.constexpr = GROUP if KIND == INT4 else depth  # inputs of one product
    x = x_ptr + token.to(tl.int64)[None, :] * k + first * depth + tl.arange(0, span)[:, None]
    present = token[None, :] < tokens  # the others are not read
    at = (tile * tiles + first) * (64 * groups) + inner
    scale_at = scale_ptr + at
    zero_at = second_ptr + at
    if KIND == NVFP4:
        row_scale = tl.load(second_ptr + row) * 256.0
    elif KIND < INT4 and groups == 0:
        row_scale = tl.load(scale_ptr + row)
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for _ in tl.range(0, steps // UNROLL, num_stages=STAGES):
        for _ in tl.static_range(UNROLL):
            codes = tl.load(words)
            if KIND == INT4:
                acc = _int4_tile(acc, codes, x, present, scale_at, zero_at, GROUP, ZERO)
            else:
                inputs = tl.load(x, mask=present, other=0.0)
                if KIND == NVFP4:
                    acc = _nvfp4_tile(acc, codes, inputs, scale_at, row_scale)
                elif KIND == MXFP4:
                    acc = _mxfp4_tile(acc, codes, inputs, scale_at)
                elif groups == 0:
                    acc = _bytes_tile(acc, codes, inputs, row_scale, KIND)
                else:
                    acc = _bytes_tile(acc, codes, inputs, tl.load(scale_at), KIND)
            words += 64 * width
            x += depth
            scale_at += 64 * groups
            zero_at += 64 * groups
    return acc


@triton.jit
def _linear(
    x_ptr, packed_ptr, scale_ptr, second_ptr, tokens, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // (64 if KIND == NVFP4 else 128) // SPLITS
    acc = _accumulate(
        x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, split * steps,
        tokens, steps, k, KIND, GROUP, ZERO, UNROLL, STAGES,
    )  # fmt: skip
    out = out_ptr + (split * tokens + token[None, :]).to(tl.int64) * n + row[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=token[None, :] < tokens)


@triton.jit
def _gated(
    x_ptr, packed_ptr, scale_ptr, second_ptr, tokens, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile is ROWS / 2 rows of gate and the same rows of up, so the gating needs no exchange."""
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * half + lane % half + (lane // half) * n
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // (64 if KIND == NVFP4 else 128)
    acc = _accumulate(
        x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, 0,
        tokens, steps, k, KIND, GROUP, ZERO, UNROLL, STAGES,
    )  # fmt: skip
    out_row = tl.program_id(0) * half + tl.arange(0, half)
    store_gated(acc, out_ptr, out_row, token, tokens, n, half, TOKENS)


@triton.jit
def store_gated(
    acc, out_ptr, row, token,
    tokens, n: tl.constexpr, half: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """silu(first half of acc's rows) times the second half, rounded where the reference rounds."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, TOKENS)), (1, 2, 0)))
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    gated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    out = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(out, gated.to(dtype), mask=token[None, :] < tokens)


def linear(x: Array, weight: QuantizedWeight, config: Config, dtype: DTypeLike) -> Array:
    """Partial sums [config.splits, tokens, out]: float32, or `dtype` where there is one part."""
    tokens, k = x.shape
    n = weight.shape[0]
    dtype = dtype if config.splits == 1 else jnp.float32
    return triton_call(
        x, *arrays(weight), tokens,
        kernel=_linear,
        name=f"linear_{type(weight).__name__}",
        out_type=jax.ShapeDtypeStruct((config.splits, tokens, n), dtype),
        grid=(n // config.rows, config.splits, triton.cdiv(tokens, config.tokens)),
        num_warps=config.num_warps,
        n=n, k=k, **kind(weight),
        TOKENS=config.tokens, ROWS=config.rows, SPLITS=config.splits,
        UNROLL=config.unroll, STAGES=config.num_stages,
    )  # fmt: skip


def gated_linear(x: Array, weight: QuantizedWeight, config: Config) -> Array:
    """[tokens, ffn] in x's dtype; `config.splits` has no meaning here."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    return triton_call(
        x, *arrays(weight), tokens,
        kernel=_gated,
        name=f"gated_linear_{type(weight).__name__}",
        out_type=jax.ShapeDtypeStruct((tokens, n), x.dtype),
        grid=(2 * n // config.rows, 1, triton.cdiv(tokens, config.tokens)),
        num_warps=config.num_warps,
        n=n, k=k, **kind(weight),
        TOKENS=config.tokens, ROWS=config.rows,
        UNROLL=config.unroll, STAGES=config.num_stages,
    )  # fmt: skip


def arrays(weight: QuantizedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales, and zero points or scales per row; where there are none, any array."""
    match weight:
        case Int4Weight(packed, scale, zero):
            return packed, scale, scale if zero is None else zero
        case Nvfp4Weight(packed, scale, row_scale):
            return packed, scale, row_scale
        case _:
            return weight.packed, weight.scale, weight.scale


def kind(weight: QuantizedWeight) -> dict[str, int]:
    match weight:
        case Int4Weight(zero=zero):
            whole = zero is not None and jnp.issubdtype(zero.dtype, jnp.integer)
            kind = NO_ZERO if zero is None else WHOLE_ZERO if whole else ANY_ZERO
            return {"KIND": INT4.value, "GROUP": weight.group, "ZERO": kind.value}
        case Int8Weight() | Fp8Weight():
            kind = INT8 if isinstance(weight, Int8Weight) else FP8
            return {"KIND": kind.value, "GROUP": weight.group, "ZERO": 0}
        case Nvfp4Weight():
            return {"KIND": NVFP4.value, "GROUP": 16, "ZERO": 0}
        case Mxfp4Weight():
            return {"KIND": MXFP4.value, "GROUP": 32, "ZERO": 0}
