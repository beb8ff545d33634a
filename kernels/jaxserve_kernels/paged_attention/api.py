"""Paged attention: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.op import Implementation, Op, Refusal, anything
from jaxserve_kernels.paged_attention import config, cpu, reference
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
    sinks: Array | None = None,
    target: Target,
) -> Array:
    """See `reference.paged_attention`."""
    return _OP(
        q, kv, page_table, tiles, sinks,
        layer=layer, tile_size=tile_size, window=window, target=target,
    )  # fmt: skip


def attend_pages(
    q: Array,
    read: Read,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    page_size: int,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> Array:
    """See `reference.attend_pages`. No GPU kernel implements it."""
    on_cpu = target.implementation == "cpu"
    module = cpu if on_cpu else reference
    return module.attend_pages(
        q,
        read,
        page_table,
        tiles,
        tile_size=tile_size,
        page_size=page_size,
        window=window,
        sinks=sinks,
    )


def _kernels(
    config: Any, q: Array, kv: Array, page_table: Array, tiles: QueryTiles, sinks: Array | None,
    *, layer: int, tile_size: int, window: int | None, target: Target,
) -> Array:  # fmt: skip
    from jaxserve_kernels.paged_attention import triton  # needs Triton: only for GPUs

    return triton.paged_attention(
        q, kv, layer, page_table, tiles, config,
        tile_size=tile_size, window=window, sinks=sinks, target=target,
    )  # fmt: skip


def _for_cpus(*_: Any, target: Target, **__: Any) -> Refusal | None:
    return None if target.implementation == "cpu" else Refusal("made for CPUs")


def _cpu(
    _: None, q: Array, kv: Array, page_table: Array, tiles: QueryTiles, sinks: Array | None,
    *, layer: int, target: Target, **options: Any,
) -> Array:  # fmt: skip
    return cpu.paged_attention(q, kv, layer, page_table, tiles, sinks=sinks, **options)


def _definition(
    _: None, q: Array, kv: Array, page_table: Array, tiles: QueryTiles, sinks: Array | None,
    *, layer: int, target: Target, **options: Any,
) -> Array:  # fmt: skip
    return reference.paged_attention(q, kv, layer, page_table, tiles, sinks=sinks, **options)


_OP = Op(
    name="paged_attention",
    implementations=(
        Implementation(name="hopper", configure=config.for_hopper, run=_kernels),
        Implementation(name="triton", configure=config.for_any, run=_kernels),
        Implementation(name="cpu", configure=_for_cpus, run=_cpu, kernels=False),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda q, *_, tile_size, **__: (
        f"{q.shape[1]} heads of {q.shape[2]}, tiles of {tile_size}"
    ),
    per_layer=True,
)
