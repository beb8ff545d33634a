"""Pieces that the Triton kernels of several KV formats share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.triton_call import triton_call

LOG2_E = 1.4426950408889634


def rows(q: Array, kv_heads: int) -> int:
    """Rows of a single token's tile: the query heads that share a KV head, but no fewer than the
    tensor cores take."""
    return max(16, triton.next_power_of_2(q.shape[1] // kv_heads))


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
def _merge_splits(
    acc_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Adds what the programs that share a context found, by their softmax weights."""
    tile = tl.program_id(0)
    q_head = tl.program_id(1)
    group: tl.constexpr = q_heads // kv_heads
    if tl.load(length_ptr + tile) > 0:
        split = tl.arange(0, SPLITS)
        dim = tl.arange(0, DIM)
        part = ((tile * kv_heads + q_head // group) * SPLITS + split).to(tl.int64) * ROWS
        part += q_head % group
        peaks = tl.load(peak_ptr + part)
        shrink = tl.exp2(peaks - tl.max(peaks, axis=0))
        weight = tl.sum(tl.load(weight_ptr + part) * shrink, axis=0)
        acc = tl.load(acc_ptr + part[:, None] * DIM + dim[None, :])
        out = tl.sum(acc * shrink[:, None], axis=0) / weight
        q_row = tl.load(first_ptr + tile).to(tl.int64) * q_heads + q_head
        tl.store(out_ptr + q_row * DIM + dim, out.to(out_ptr.dtype.element_ty))


type Launch = Callable[[tuple[jax.Ref, ...], tuple[jax.ShapeDtypeStruct, ...]], Any]
"""Launches a kernel whose last parameters are the result (or sums), peaks and weights: given
arrays that it writes, and the types of those that it makes."""


def split_attention(
    launch: Launch, q: Array, tiles: QueryTiles, kv_heads: int, splits: int, out: jax.Ref | None
) -> Array | None:
    """Attention of single tokens whose contexts `splits` programs share: returned, or stored in
    `out` between others' results."""
    num_tiles, q_heads, head_dim = tiles.first.shape[0], *q.shape[1:]
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    given = () if out is None else (out,)
    made = () if given else (whole,)
    if splits == 1:
        nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
        result = launch(given, (*made, nothing, nothing))
        return None if given else result[0]
    parts = (num_tiles, kv_heads, splits, rows(q, kv_heads))
    statistics = jax.ShapeDtypeStruct(parts, jnp.float32)
    sums = jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)
    result = triton_call(
        *launch((), (sums, statistics, statistics)), tiles.first, tiles.length, *given,
        kernel=_merge_splits,
        name="paged_attention_merge",
        out_type=made,
        grid=(num_tiles, q_heads),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=parts[3], DIM=head_dim, SPLITS=splits,
    )  # fmt: skip
    return None if given else result[0]
