"""Paged attention: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.reference import QueryTiles


def paged_attention(
    q: Array, kv: Array, layer: int, page_table: Array, tiles: QueryTiles, *, tile_size: int
) -> Array:
    """See `reference.paged_attention`."""
    if not target.uses_triton():
        return reference.paged_attention(q, kv, layer, page_table, tiles, tile_size=tile_size)
    from jaxserve_kernels.paged_attention import triton  # needs Triton: only for GPUs

    return triton.paged_attention(q, kv, layer, page_table, tiles, tile_size=tile_size)
