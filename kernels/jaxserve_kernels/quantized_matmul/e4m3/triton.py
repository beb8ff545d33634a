"""Products of many tokens in e4m3, at twice the tensor cores' rate for bfloat16.

Tokens get one scale each, weights one per row. Weights of 4 bits are rounded to e4m3 on the way,
in a pass of its own: with many tokens it costs little beside the product, and its error, like that
of the tokens, is a quarter of what 4 bits cost.

Tokens are written in the order in which packed bytes lie; a product does not care.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton import NO_ZERO, arrays, kind, store_gated
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import E4M3_MAX, Fp8Weight, Int4Weight


@triton.jit
def _quantize_tokens(x_ptr, tokens, out_ptr, scale_ptr, k: tl.constexpr, BLOCK: tl.constexpr):
    """One token: e4m3 in the order of packed bytes, one scale, float32 [padded].

    Byte i of a tile's row holds input 64 * (i % 2) + i // 2.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    byte = place % 128
    source = place - byte + 64 * (byte % 2) + byte // 2
    mask = place < k
    known = mask & (token < tokens)
    x = tl.load(x_ptr + token * k + source, mask=known, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / 448.0
    values = x / tl.where(scale > 0.0, scale, 1.0)
    tl.store(out_ptr + token * k + place, values.to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + token, scale)


@triton.jit
def _accumulate(
    x_ptr, token_scale_ptr, packed_ptr, scale_ptr, row, token, first, steps: tl.constexpr,
    k: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 128)
    tile = (row // 64).to(tl.int64)
    inner = row % 64
    start = tile * (k // 128) + first
    weight = packed_ptr.to(tl.pointer_type(tl.float8e4nv)) + start * 8192 + inner * 128
    weight = weight[:, None] + lane[None, :]
    x = x_ptr + token.to(tl.int64)[None, :] * k + first * 128 + lane[:, None]
    scale_at = scale_ptr + start * 64 + inner
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        if k == GROUP:
            acc = tl.dot(tl.load(weight), tl.load(x), acc)
        else:
            acc += tl.dot(tl.load(weight), tl.load(x)) * tl.load(scale_at)[:, None]
        weight += 8192
        x += 128
        scale_at += 64
    if k == GROUP:
        acc *= tl.load(scale_ptr + row)[:, None]
    return acc * tl.load(token_scale_ptr + token)[None, :]


@triton.jit
def _product(
    x_ptr, token_scale_ptr, packed_ptr, scale_ptr, tokens, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    GATED: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GATED: a tile is ROWS / 2 rows of gate and the same rows of up; n is half the weight's."""
    split = tl.program_id(1)
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    if GATED:
        row = tl.program_id(0) * half + lane % half + (lane // half) * n
    else:
        row = tl.program_id(0) * ROWS + lane
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // 128 // SPLITS
    acc = _accumulate(
        x_ptr, token_scale_ptr, packed_ptr, scale_ptr, row, token, split * steps, steps,
        k, GROUP, STAGES,
    )  # fmt: skip
    if GATED:
        row = tl.program_id(0) * half + tl.arange(0, half)
        store_gated(acc, out_ptr, row, token, tokens, n, half, TOKENS)
    else:
        out = out_ptr + (split * tokens + token[None, :]).to(tl.int64) * n + row[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=token[None, :] < tokens)


@triton.jit
def _bytes_of(low, high):
    """float32 values to words of their e4m3 codes."""
    low = low.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
    high = high.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
    return low | (high << 8)


@triton.jit
def _plane(
    words, scale_ptr, zero_ptr, inverse,
    GROUP: tl.constexpr, ZERO: tl.constexpr, plane: tl.constexpr,
):  # fmt: skip
    """A plane's weights over their rows' scales, in float32."""
    group: tl.constexpr = plane * 32 // GROUP
    scale = tl.load(scale_ptr + group * 64) * inverse
    zero = 8.0
    if ZERO != NO_ZERO:
        zero = tl.load(zero_ptr + group * 64).to(tl.float32)[:, None]
    return (((words >> (4 * plane)) & 15).to(tl.float32) - zero) * scale[:, None]


@triton.jit
def _int4_to_e4m3(
    packed_ptr, scale_ptr, zero_ptr, row_scale_ptr, out_ptr,
    tiles: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """One tile of 64 rows by 128 inputs, from packed nibbles to packed bytes."""
    tile = tl.program_id(1)
    at = (tile.to(tl.int64) * tiles + tl.program_id(0)) * 64
    row = tl.arange(0, 64)
    lane = tl.arange(0, 32)
    inverse = 1.0 / tl.load(row_scale_ptr + tile * 64 + row)
    words = tl.load(packed_ptr + (at + row)[:, None] * 32 + lane[None, :])
    scale = scale_ptr + at * (128 // GROUP) + row
    zero = zero_ptr + at * (128 // GROUP) + row
    for plane in tl.static_range(2):
        low = _plane(words, scale, zero, inverse, GROUP, ZERO, plane)
        high = _plane(words, scale, zero, inverse, GROUP, ZERO, plane + 2)
        out = out_ptr + (at + row)[:, None] * 64 + 32 * plane + lane[None, :]
        tl.store(out, _bytes_of(low, high))


def linear(x: Array, weight: Int4Weight | Fp8Weight, config: Config, dtype: DTypeLike) -> Array:
    """Partial sums [config.splits, tokens, out]: float32, or `dtype` where there is one part."""
    dtype = dtype if config.splits == 1 else jnp.float32
    shape = (config.splits, x.shape[0], weight.shape[0])
    return _launch(x, weight, config, jax.ShapeDtypeStruct(shape, dtype), gated=False)


def gated_linear(x: Array, weight: Int4Weight | Fp8Weight, config: Config) -> Array:
    """[tokens, ffn] in x's dtype; `config.splits` must be 1."""
    shape = (x.shape[0], weight.shape[0] // 2)
    return _launch(x, weight, config, jax.ShapeDtypeStruct(shape, x.dtype), gated=True)


def _launch(
    x: Array,
    weight: Int4Weight | Fp8Weight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
) -> Array:
    tokens, k = x.shape
    weight = weight if isinstance(weight, Fp8Weight) else to_fp8(weight)
    padded = triton.cdiv(tokens, config.tokens) * config.tokens
    codes, token_scale = quantize_tokens(x, padded)
    return triton_call(
        codes, token_scale, weight.packed, weight.scale, tokens,
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_e4m3",
        out_type=out_type,
        grid=(weight.shape[0] // config.rows, config.splits, padded // config.tokens),
        num_warps=config.num_warps,
        n=out_type.shape[-1], k=k, GATED=gated, GROUP=weight.group,
        TOKENS=config.tokens, ROWS=config.rows, SPLITS=config.splits, STAGES=config.num_stages,
    )  # fmt: skip


def quantize_tokens(x: Array, padded: int) -> tuple[Array, Array]:
    """e4m3 [padded, k] in the order of packed bytes, float32 scales [padded].

    Tokens past x's are zeros.
    """
    tokens, k = x.shape
    return triton_call(
        x, tokens,
        kernel=_quantize_tokens,
        name="quantize_tokens",
        out_type=(
            jax.ShapeDtypeStruct((padded, k), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((padded,), jnp.float32),
        ),
        grid=(padded,),
        num_warps=8 if k > 4096 else 4,
        k=k, BLOCK=triton.next_power_of_2(k),
    )  # fmt: skip


def to_fp8(weight: Int4Weight) -> Fp8Weight:
    """A weight of 4 bits in e4m3, with scales that put the largest possible value at 448."""
    out, k = weight.shape
    scale = weight.largest() / E4M3_MAX
    described = kind(weight)
    packed = triton_call(
        *arrays(weight), scale,
        kernel=_int4_to_e4m3,
        name="int4_to_e4m3",
        out_type=jax.ShapeDtypeStruct((out // 64, k // 128, 64, 64), jnp.uint16),
        grid=(k // 128, out // 64),
        num_warps=4,
        tiles=k // 128, GROUP=described["GROUP"], ZERO=described["ZERO"],
    )  # fmt: skip
    return Fp8Weight(packed, scale)
