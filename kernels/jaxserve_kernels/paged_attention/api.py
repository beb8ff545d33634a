"""Paged attention: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.paged_attention import cpu, reference
from jaxserve_kernels.paged_attention.reference import QueryTiles, Read
from jaxserve_kernels.target import Target


def paged_attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    window: int | None = None,
    target: Target,
) -> Array:
    """See `reference.paged_attention`."""
    if target.uses_triton():
        from jaxserve_kernels.paged_attention import triton  # needs Triton: only for GPUs

        def kernels(q: Array, kv: Array, page_table: Array, tiles: QueryTiles) -> Array:
            return triton.paged_attention(
                q, kv, layer, page_table, tiles, tile_size=tile_size, window=window, target=target
            )

        args = (q, kv, page_table, tiles)
        if compiles("paged_attention", kernels, *args, static=(tile_size, window), target=target):
            return kernels(*args)
    module = cpu if target.implementation == "cpu" else reference
    return module.paged_attention(
        q, kv, layer, page_table, tiles, tile_size=tile_size, window=window
    )


def attend_pages(
    q: Array,
    read: Read,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    page_size: int,
    window: int | None = None,
    target: Target,
) -> Array:
    """See `reference.attend_pages`; there is no kernel for it."""
    on_cpu = target.implementation == "cpu"
    module = cpu if on_cpu else reference
    return module.attend_pages(
        q, read, page_table, tiles, tile_size=tile_size, page_size=page_size, window=window
    )
