"""Tokens to 8 bits on a GPU: a part of kernels that have a token's row, and a kernel of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, TokenFormat
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def store_quantized(
    x, token, padded, codes_ptr, scale_ptr, sum_ptr, k: tl.constexpr, GROUP: tl.constexpr
):
    """x: a token's float32 row of k inputs and zeros up to a power of two. See `TokenFormat`."""
    block: tl.constexpr = x.shape[0]
    place = tl.arange(0, block)
    mask = place < k
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    scale = tl.max(tl.abs(x), axis=0) / largest
    values = x * (1.0 / tl.where(scale > 0.0, scale, 1.0))
    if dtype == tl.int8:
        values = (values + 12582912.0) - 12582912.0  # to the nearest
    codes = values.to(dtype)
    tl.store(scale_ptr + token, scale)
    if GROUP:
        sums = tl.sum(tl.reshape(codes.to(tl.float32), (block // GROUP, GROUP)), axis=1)
        group = tl.arange(0, block // GROUP)
        tl.store(sum_ptr + group * padded + token, sums, mask=group < k // GROUP)
    else:
        within = place % 128
        place += 2 * (within % 64) + within // 64 - within
    tl.store(codes_ptr + token.to(tl.int64) * k + place, codes, mask=mask)


@triton.jit
def _quantize(
    x_ptr, padded, codes_ptr, scale_ptr, sum_ptr,
    k: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * k + place, mask=place < k, other=0.0)
    store_quantized(x.to(tl.float32), token, padded, codes_ptr, scale_ptr, sum_ptr, k, GROUP)


def quantized(x: Array, form: TokenFormat) -> QuantizedTokens:
    """x [tokens, k] in 8 bits."""
    tokens, k = x.shape
    return QuantizedTokens(
        *triton_call(
            x, form.padded,
            kernel=_quantize,
            name="quantize_tokens",
            out_type=out_types(tokens, k, form),
            grid=(tokens,),
            num_warps=16 if k > 4096 else 8,
            k=k, BLOCK=triton.next_power_of_2(k), GROUP=form.group,
        )
    )  # fmt: skip


def out_types(tokens: int, k: int, form: TokenFormat) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the arrays of `QuantizedTokens`."""
    groups = k // form.group if form.group else 1
    return (
        jax.ShapeDtypeStruct((form.padded, k), form.dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
        jax.ShapeDtypeStruct((groups, form.padded), jnp.float32),
    )
