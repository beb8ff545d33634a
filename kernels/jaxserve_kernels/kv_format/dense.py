"""Keys and values as they are computed, or rounded to another float: one array.

[layers, pages, kv_heads, 2, page_size, head_dim]    keys, then values, on the axis of 2
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs
from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape, zeros
from jaxserve_kernels.paged_attention import paged_attention
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The array in `dtype`; None: in the dtype of the activations."""

    dtype: str | None = None
    page_size: int | None = None

    @property
    def name(self) -> str:
        return "auto" if self.dtype is None else "bf16"

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        dims = (shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size, shape.head_dim)
        return jax.ShapeDtypeStruct(dims, jnp.dtype(self.dtype or dtype))

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Array:
        return zeros(self.abstract(shape, dtype))


def attend(
    qkv: Array,
    kv: Array,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
    target: Target,
) -> tuple[Array, Array]:
    """See `api.attend`."""
    slots = KVSlots(step.pages, step.offsets)
    if target.pdl and tile_size == 1:
        from jaxserve_kernels.paged_attention import triton_streaming, triton_warps  # need Triton

        kernels = triton_streaming if qkv.shape[1] <= triton_streaming.MAX_TILES else triton_warps
        if kernels.fits(qkv, kv, dtype):
            return kernels.attend(
                qkv,
                kv,
                layer,
                heads,
                tables,
                slots,
                step.page_table,
                step.tiles,
                eps=eps, window=window,
                target=target,
            )  # fmt: skip
    q, kv = attention_inputs(
        qkv, kv, layer, heads, tables, slots, eps=eps, dtype=dtype, target=target
    )
    out = paged_attention(
        q, kv, layer, step.page_table, step.tiles, tile_size=tile_size, window=window, target=target
    )
    return out.astype(dtype), kv
