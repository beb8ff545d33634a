"""Pieces that the Triton kernels of several KV formats share."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from jaxserve_kernels import target

LOG2_E = 1.4426950408889634


def capability() -> int:
    """Compute capability of the GPU that is traced for, e.g. 90."""
    named = target.current().compute_capability
    if named is not None:
        return named
    return round(float(jax.devices()[0].compute_capability) * 10)


@triton.jit
def head_halves(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, first,
    stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    eps: tl.constexpr, dtype: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token from number `first` on, queries and keys normed and rotated.

    Two matrices [HEADS, HALF] of `dtype`, rounded where the reference rounds: the first and the
    second half of each head.
    """
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + first) * (2 * HALF)
    source += head[:, None] * (2 * HALF) + dim[None, :]
    low = tl.zeros([HEADS, HALF], tl.float32)
    high = tl.zeros([HEADS, HALF], tl.float32)
    for part in tl.static_range(parts):
        low += tl.load(source + part * stride).to(tl.float32)
        high += tl.load(source + part * stride + HALF).to(tl.float32)
    low = low.to(dtype)
    high = high.to(dtype)
    if first < q_heads + kv_heads:
        norm_ptr = q_norm_ptr if first < q_heads else k_norm_ptr
        norm_low = tl.load(norm_ptr + dim).to(tl.float32)
        norm_high = tl.load(norm_ptr + HALF + dim).to(tl.float32)
        cos = tl.load(cos_ptr + token * HALF + dim)
        sin = tl.load(sin_ptr + token * HALF + dim)
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        square = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        a = ((wide_low * scale).to(dtype).to(tl.float32) * norm_low[None, :]).to(dtype)
        b = ((wide_high * scale).to(dtype).to(tl.float32) * norm_high[None, :]).to(dtype)
        wide_low = a.to(tl.float32)
        wide_high = b.to(tl.float32)
        low = (wide_low * cos[None, :] - wide_high * sin[None, :]).to(dtype)
        high = (wide_high * cos[None, :] + wide_low * sin[None, :]).to(dtype)
    return low, high


@triton.jit
def round_even(x):
    """To the nearest integer, halves to the even one; for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def merge_splits(
    acc_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Adds what the programs that share a context found, by their softmax weights."""
    tile = tl.program_id(0)
    q_head = tl.program_id(1)
    token = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    if token < tl.load(length_ptr + tile):
        row = token * group + q_head % group
        split = tl.arange(0, SPLITS)
        dim = tl.arange(0, DIM)
        part = ((tile * kv_heads + q_head // group) * SPLITS + split).to(tl.int64) * ROWS + row
        peaks = tl.load(peak_ptr + part)
        shrink = tl.exp2(peaks - tl.max(peaks, axis=0))
        weight = tl.sum(tl.load(weight_ptr + part) * shrink, axis=0)
        acc = tl.load(acc_ptr + part[:, None] * DIM + dim[None, :])
        out = tl.sum(acc * shrink[:, None], axis=0) / weight
        q_row = (tl.load(first_ptr + tile).to(tl.int64) + token) * q_heads + q_head
        tl.store(out_ptr + q_row * DIM + dim, out.to(out_ptr.dtype.element_ty))
