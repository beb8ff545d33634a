"""Attention of chunks: their pages are first expanded to plain keys and values, once per layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format import chunks
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV
from jaxserve_kernels.kv_format.eight_bit.triton_numbers import halves, numbers
from jaxserve_kernels.paged_attention import paged_attention
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def _expand(
    words_ptr, scales_ptr, page_ptr, taken_ptr, out_ptr, layer, num_pages,
    kv_heads: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Expands one head of page after page: keys and values times their scales."""
    kv_head = tl.program_id(1)
    row = tl.arange(0, 2 * PAGE)  # keys, then values
    dim = tl.arange(0, HALF)[None, :]
    first_page = (layer * num_pages).to(tl.int64)
    for place in range(tl.program_id(0), tl.load(taken_ptr), tl.num_programs(0)):
        page = first_page + tl.load(page_ptr + place)
        source = (page * kv_heads + kv_head) * (2 * PAGE) + row
        low, high = halves(tl.load(words_ptr + source[:, None] * HALF + dim), FP8, FAST)
        if FP8:
            scale = tl.load(scales_ptr + (layer * kv_heads + kv_head) * 2 + row // PAGE)[:, None]
        else:
            scale = tl.load(scales_ptr + source)[:, None]
        dtype = out_ptr.dtype.element_ty
        target = (place * kv_heads + kv_head).to(tl.int64) * (2 * PAGE) + row
        at = out_ptr + target[:, None] * (2 * HALF) + dim
        tl.store(at, (low.to(tl.float32) * scale).to(dtype))
        tl.store(at + HALF, (high.to(tl.float32) * scale).to(dtype))


def attend(
    q: Array,
    kv: EightBitKV,
    layer: int,
    step: AttentionStep,
    *,
    tile_size: int,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> Array:
    """Attention of the step's chunks, i.e. of all tiles but the decode rows."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    slots, width = step.page_table.shape
    each = chunks.of_tiles(step.tiles, slots)
    counts = (each.end + page_size - 1) // page_size
    behind = None
    if window is not None:  # skip the pages that no token of the chunk sees
        behind = jnp.maximum(each.start - window + 1, 0) // page_size
        counts = jnp.maximum(counts - behind, 0)
    places = chunks.divide(counts, chunks.capacity(width * page_size) // page_size)
    count = places.slot.shape[0]
    number = places.number if behind is None else places.number + behind[places.slot]
    pages = step.page_table.at[places.slot, number].get(mode="clip")
    expanded = triton_call(
        kv.words, kv.scales, pages, places.taken,
        kernel=_expand,
        name="expand_8_bit",
        target=target,
        out_type=jax.ShapeDtypeStruct((1, count, kv_heads, 2, page_size, 2 * half), q.dtype),
        grid=(min(count, chunks.programs(kv_heads, target=target)), kv_heads),
        num_warps=4,
        layer=layer, num_pages=num_pages,
        kv_heads=kv_heads, HALF=half, PAGE=page_size, **numbers(q.dtype, kv, target=target),
    )  # fmt: skip
    first = places.first if behind is None else places.first - behind
    table = jnp.minimum(first[:, None] + jnp.arange(width, dtype=jnp.int32), count - 1)
    if behind is not None:
        table = jnp.maximum(table, 0)
    tiles = step.tiles._replace(decode_rows=None)
    return paged_attention(
        q, expanded, 0, table, tiles,
        tile_size=tile_size, window=window, sinks=sinks, target=target,
    )  # fmt: skip
