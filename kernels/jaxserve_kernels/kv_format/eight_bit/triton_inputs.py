"""Computes queries, and writes the step's keys and values to their pages in 8 bits."""

from __future__ import annotations

import math
from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.attention_inputs.triton_parts import head_halves
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_MAX_HEADS = 8


@triton.jit
def round_even(x):
    """Rounds to the nearest integer, ties to even; for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_byte(x, E4M3: tl.constexpr):
    """The byte of the nearest e4m3 number, ties to even; for |x| <= 448. E4M3: the GPU has
    instructions for this conversion."""
    if E4M3:
        byte = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        byte = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # the bias corrected
        near_zero = round_even(tl.abs(x) * 512.0).to(tl.int32)  # below 2 ** -6: steps of 2 ** -9
        byte = tl.where(size < (121 << 23), near_zero, byte) | ((bits >> 24) & 0x80)
    return byte


@triton.jit
def bytes_of(low, high, given, FP8: tl.constexpr, E4M3: tl.constexpr):
    """Encodes halves of heads. Returns their bytes and the heads' scales: the given ones for fp8,
    computed ones for int8."""
    if FP8:
        low_byte = e4m3_byte(tl.clamp(low / given[:, None], -448.0, 448.0), E4M3)
        high_byte = e4m3_byte(tl.clamp(high / given[:, None], -448.0, 448.0), E4M3)
        scales = given
    else:
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
        inverse = (127.0 / tl.where(largest > 0, largest, 127.0))[:, None]
        scales = largest / 127.0
        low_byte = round_even(low * inverse).to(tl.int32) + 128
        high_byte = round_even(high * inverse).to(tl.int32) + 128
    return low_byte, high_byte, scales


@triton.jit
def _write(
    qkv_ptr, words_ptr, scales_ptr, layer, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr,
    page_ptr, offset_ptr, q_ptr,
    num_pages, stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    page_size: tl.constexpr, eps: tl.constexpr, FP8: tl.constexpr, E4M3: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS  # heads in the order queries, keys, values
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    low, high = head_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, first,
        stride, parts, q_heads, kv_heads, eps, q_ptr.dtype.element_ty, HEADS, HALF, EARLY,
    )  # fmt: skip
    if first < q_heads:
        target = q_ptr + (token * q_heads + first + head[:, None]) * (2 * HALF) + dim[None, :]
        tl.store(target, low)
        tl.store(target + HALF, high)
    else:
        page = (layer * num_pages).to(tl.int64) + tl.load(page_ptr + token).to(tl.int64)
        is_value = tl.where(first >= q_heads + kv_heads, 1, 0)
        kv_head = first - q_heads - is_value * kv_heads + head
        row = ((page * kv_heads + kv_head) * 2 + is_value) * page_size
        row += tl.load(offset_ptr + token)
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        given = tl.full([HEADS], 1.0, tl.float32)
        if FP8:
            given = tl.load(scales_ptr + (layer * kv_heads + kv_head) * 2 + is_value)
        low_byte, high_byte, scales = bytes_of(wide_low, wide_high, given, FP8, E4M3)
        if not FP8:
            tl.store(scales_ptr + row, scales)
        words = (low_byte | (high_byte << 8)).to(tl.int16)
        tl.store(words_ptr + row[:, None] * HALF + dim[None, :], words)


def write[Cache: EightBitKV](
    qkv: Array,
    kv: Cache,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, Cache]:
    """Returns queries [tokens, q_heads, head_dim], and the cache with the step's keys and
    values."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = width // (2 * half) - 2 * kv_heads
    block = math.gcd(math.gcd(q_heads, kv_heads), _MAX_HEADS)
    words, scales = references(kv)
    q = triton_call(
        qkv, words, scales, layer, *heads.of_inputs, *tables, step.pages, step.offsets,
        kernel=_write,
        name="kv_write_8_bit",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens, q_heads, 2 * half), dtype),
        grid=(tokens, (q_heads + 2 * kv_heads) // block),
        num_warps=4,
        num_pages=num_pages, stride=tokens * width, parts=parts,
        q_heads=q_heads, kv_heads=kv_heads, page_size=page_size,
        eps=eps, FP8=kv.fp8, E4M3=target.gpu.compute_capability >= 89, HEADS=block, HALF=half,
    )  # fmt: skip
    return q, frozen(kv, words, scales)


def references(kv: EightBitKV) -> tuple[Any, Any]:
    """Words and scales as kernel arguments: Refs if the kernel writes them. fp8's scales are only
    read."""
    return jax.new_ref(kv.words), kv.scales if kv.fp8 else jax.new_ref(kv.scales)


def frozen[Cache: EightBitKV](kv: Cache, words: Any, scales: Any) -> Cache:
    """The cache after kernels have written into its `references`."""
    kv = kv._replace(words=jax.freeze(words))
    return kv if kv.fp8 else kv._replace(scales=jax.freeze(scales))
