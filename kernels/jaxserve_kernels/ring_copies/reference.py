"""The definition of copies between a cache's array and a ring's, and within an array, in plain
JAX."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import Array, lax


def from_ring(pages: Array, ring: Array, pairs: Array, *, axis: int) -> Array:
    """Copies slots of a ring into pages: pages[:, page] = ring[slot], for each pair.

    Args:
      pages: [..., pages, ...], updated in place when donated.
      ring: [slots, ...] in the same dtype: an axis of slots, then the axes of `pages` except that
        of pages.
      pairs: int32 [2, moves], page numbers, then slot numbers. A page may occur twice only if
        nobody reads it.
      axis: the axis of pages.

    Returns:
      The array with these pages overwritten.
    """
    for page, slot in _each(pairs):
        part = lax.dynamic_slice_in_dim(ring, slot, 1)
        pages = lax.dynamic_update_slice_in_dim(pages, jnp.moveaxis(part, 0, axis), page, axis)
    return pages


def to_ring(pages: Array, ring: Array, pairs: Array, *, axis: int) -> Array:
    """Copies pages into slots of a ring: ring[slot] = pages[:, page], for each pair.

    Returns the ring, which is updated in place when donated. Arguments are those of `from_ring`. A
    slot may occur twice only if nobody reads it.
    """
    for page, slot in _each(pairs):
        part = jnp.moveaxis(lax.dynamic_slice_in_dim(pages, page, 1, axis), axis, 0)
        ring = lax.dynamic_update_slice_in_dim(ring, part, slot, 0)
    return ring


def within(pages: Array, pair: Array, *, axis: int) -> Array:
    """Copies one page of an array to the place of another: pages[:, pair[1]] = pages[:, pair[0]].

    Args:
      pages: [..., pages, ...], updated in place when donated.
      pair: int32 [2], the numbers of the source and of the target.
      axis: the axis of pages.
    """
    one = lax.dynamic_slice_in_dim(pages, pair[0], 1, axis)
    # In one fusion with the update, XLA would copy the whole array to read it unchanged.
    one = lax.optimization_barrier(one)
    return lax.dynamic_update_slice_in_dim(pages, one, pair[1], axis)


def _each(pairs: Array) -> Iterator[tuple[Array, Array]]:
    """Yields the page and the slot of each move. The copies are unrolled: a loop on the device
    launches them one by one and takes twice as long (lab/logs/offload.md)."""
    return ((pairs[0, number], pairs[1, number]) for number in range(pairs.shape[1]))
