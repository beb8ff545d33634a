"""`attention_inputs` with one program per token and block of heads. It writes keys and values
directly to their pages."""

from __future__ import annotations

import math

import jax
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs.reference import HeadWeights, KVSlots
from jaxserve_kernels.attention_inputs.triton_parts import head_halves
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_MAX_HEADS = 8
"""Heads per program: enough to hide the load latency, few enough to fill the GPU at batch 1."""


@triton.jit
def _kernel(
    qkv_ptr, kv_ptr, first_page, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr,
    page_ptr, offset_ptr, q_ptr,
    stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    eps: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS  # heads in the order queries, keys, values
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    page = first_page + tl.load(page_ptr + token).to(tl.int64)
    offset = tl.load(offset_ptr + token)
    low, high = head_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, first,
        stride, parts, q_heads, kv_heads, eps, q_ptr.dtype.element_ty, HEADS, HALF, EARLY,
    )  # fmt: skip
    if first < q_heads:
        target = q_ptr + (token * q_heads + first + head[:, None]) * (2 * HALF) + dim[None, :]
        tl.store(target, low)
        tl.store(target + HALF, high)
    else:
        is_value = first >= q_heads + kv_heads
        kv_head = first - q_heads - tl.where(is_value, kv_heads, 0) + head[:, None]
        row = ((page * kv_heads + kv_head) * 2 + tl.where(is_value, 1, 0)) * page_size + offset
        target = kv_ptr + row * (2 * HALF) + dim[None, :]
        tl.store(target, low.to(kv_ptr.dtype.element_ty))
        tl.store(target + HALF, high.to(kv_ptr.dtype.element_ty))


def attention_inputs(
    qkv: Array,
    kv: Array,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    slots: KVSlots,
    *,
    eps: float,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, Array]:
    """See `attention_inputs.api`: one program for a token and up to eight of its heads."""
    num_pages, kv_heads, _, page_size, head_dim = kv.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = width // head_dim - 2 * kv_heads
    block = math.gcd(math.gcd(q_heads, kv_heads), _MAX_HEADS)
    cache = jax.new_ref(kv)
    q = triton_call(
        qkv, cache, layer * num_pages, *heads.of_inputs, *tables, *slots,
        kernel=_kernel,
        name="attention_inputs",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens, q_heads, head_dim), dtype),
        grid=(tokens, (q_heads + 2 * kv_heads) // block),
        num_warps=4,
        stride=tokens * width, parts=parts,
        q_heads=q_heads, kv_heads=kv_heads, page_size=page_size,
        eps=eps, HEADS=block, HALF=head_dim // 2,
    )  # fmt: skip
    return q, jax.freeze(cache)
