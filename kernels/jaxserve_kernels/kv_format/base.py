"""Types that all KV formats share: the shape of a cache, and a step's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels import tables
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of a cache, for any format. Page 0 and the last slot belong to padding."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    slots: int
    """Sequences that may run at once, plus the padding slot."""


class CacheArrays:
    """Base class of caches of several arrays. Each is a subclass of this class and of a NamedTuple
    of its arrays. Its type identifies the KV format."""

    __slots__ = ()


class AttentionStep(NamedTuple):
    """Slots, positions, pages and query tiles of a step's tokens. All arrays are int32. Padding
    tokens point to page 0."""

    slots: Array  # [tokens]: the sequence's row of the page table
    positions: Array  # [tokens]
    pages: Array  # [tokens]: page to which the token's key and value are written
    offsets: Array  # [tokens]: offset within the page
    tiles: QueryTiles
    page_table: Array  # [slots, pages_per_seq]


class Limits(NamedTuple):
    """See `tables/kv_format/`."""

    eight_bit_programs: int
    kvarn_programs: int
    kvarn_streaming_programs: int
    kvarn_encode_programs: int


def limits_of(target: Target) -> Limits:
    """The limits measured on the nearest card."""
    return tables.limits("kv_format", Limits, target)


def zeros(abstract: Any) -> Any:
    """Arrays of zeros of the given shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
