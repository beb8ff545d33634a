"""What all KV formats have in common: the shape they fill and the step they serve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels import tables
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The cache that a format lays out. Page 0 and the last slot belong to padding."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    slots: int
    """Sequences that may run at once, and the padding slot."""


class AttentionStep(NamedTuple):
    """Where the tokens of a step belong. All arrays int32; padding tokens point to page 0."""

    slots: Array  # [tokens]: the sequence's row of the page table
    positions: Array  # [tokens]
    pages: Array  # [tokens]: page that takes the token's key and value
    offsets: Array  # [tokens]: place within the page
    tiles: QueryTiles
    page_table: Array  # [slots, pages_per_seq]


class KVFormat(Protocol):
    """A way to lay out keys and values. The arrays are a pytree of a type of their own, by which
    `attend` finds the format; everything else passes it on without looking inside."""

    @property
    def name(self) -> str:
        """As in `--kv-cache-dtype`."""
        ...

    @property
    def page_size(self) -> int | None:
        """The only page size that the format works with; None: any."""
        ...

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """Shapes and dtypes of the arrays, for activations of `dtype`."""
        ...

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """The arrays of an empty cache."""
        ...


class Limits(NamedTuple):
    """See `tables/kv_format/`."""

    eight_bit_programs: int
    kvarn_programs: int
    kvarn_streaming_programs: int
    kvarn_encode_programs: int


def limits_of(target: Target) -> Limits:
    """What was measured on the nearest card."""
    return tables.limits("kv_format", Limits, target)


def zeros(abstract: Any) -> Any:
    """Arrays of zeros of the given shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def page_bytes(kv_format: KVFormat, shape: CacheShape, dtype: DTypeLike) -> int:
    """Bytes that each page takes in all layers, whatever `shape.pages` says."""
    one, two = (dataclasses.replace(shape, pages=pages) for pages in (1, 2))
    return _bytes(kv_format, two, dtype) - _bytes(kv_format, one, dtype)


def fixed_bytes(kv_format: KVFormat, shape: CacheShape, dtype: DTypeLike) -> int:
    """Bytes that the format takes beside its pages: scales, what it keeps per slot."""
    one = dataclasses.replace(shape, pages=1)
    return _bytes(kv_format, one, dtype) - page_bytes(kv_format, shape, dtype)


def _bytes(kv_format: KVFormat, shape: CacheShape, dtype: DTypeLike) -> int:
    leaves = jax.tree.leaves(kv_format.abstract(shape, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
