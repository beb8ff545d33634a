"""Bias, QK-norm and RoPE of some heads of a token: shared by kernels that store the result."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def head_halves(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, first,
    stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    eps: tl.constexpr, dtype: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token from number `first` on. Queries and keys are normed and rotated.

    Returns the first and the second half of each head, two matrices [HEADS, HALF] of `dtype`,
    rounded where the reference rounds. EARLY: wait for earlier kernels before reading qkv. Norms
    and bias are None if the model has none.
    """
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + first) * (2 * HALF)
    source += head[:, None] * (2 * HALF) + dim[None, :]
    if bias_ptr is None:
        low = tl.zeros([HEADS, HALF], tl.float32)
        high = tl.zeros([HEADS, HALF], tl.float32)
    else:
        bias = bias_ptr + (first + head[:, None]) * (2 * HALF) + dim[None, :]
        low = tl.load(bias).to(tl.float32)
        high = tl.load(bias + HALF).to(tl.float32)
    if q_norm_ptr is not None:
        norm_ptr = q_norm_ptr if first < q_heads else k_norm_ptr
        norm_low = tl.load(norm_ptr + dim).to(tl.float32)
        norm_high = tl.load(norm_ptr + HALF + dim).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + dim)
    sin = tl.load(sin_ptr + token * HALF + dim)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for part in tl.static_range(parts):
        low += tl.load(source + part * stride)
        high += tl.load(source + part * stride + HALF)
    low = low.to(dtype)
    high = high.to(dtype)
    if first < q_heads + kv_heads:
        if q_norm_ptr is None:
            low, high = _rotated(low, high, cos[None, :], sin[None, :])
        else:
            low, high = _normed_and_rotated(
                low, high, norm_low[None, :], norm_high[None, :], cos[None, :], sin[None, :], eps
            )
    return low, high


@triton.jit
def _normed_and_rotated(low, high, norm_low, norm_high, cos, sin, eps: tl.constexpr):
    """Norm and RoPE, rounded where the reference rounds: after the norm and after its weight."""
    dtype: tl.constexpr = low.dtype
    wide_low = low.to(tl.float32)
    wide_high = high.to(tl.float32)
    square = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1) / (2 * low.shape[1])
    scale = tl.rsqrt(square + eps)[:, None]
    low = ((wide_low * scale).to(dtype).to(tl.float32) * norm_low).to(dtype)
    high = ((wide_high * scale).to(dtype).to(tl.float32) * norm_high).to(dtype)
    return _rotated(low, high, cos, sin)


@triton.jit
def _rotated(low, high, cos, sin):
    dtype: tl.constexpr = low.dtype
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
