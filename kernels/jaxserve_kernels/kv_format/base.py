"""What all KV formats have in common: the shape they fill and the step they serve."""

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
    """The cache that a format lays out. Page 0 and the last slot belong to padding."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    slots: int
    """Sequences that may run at once, and the padding slot."""


class CacheArrays:
    """The arrays of a cache, unless one array is enough: a subclass of a NamedTuple of them and of
    this class, by which a KV format is found."""

    __slots__ = ()


class AttentionStep(NamedTuple):
    """Where the tokens of a step belong. All arrays int32; padding tokens point to page 0."""

    slots: Array  # [tokens]: the sequence's row of the page table
    positions: Array  # [tokens]
    pages: Array  # [tokens]: page that takes the token's key and value
    offsets: Array  # [tokens]: place within the page
    tiles: QueryTiles
    page_table: Array  # [slots, pages_per_seq]


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
