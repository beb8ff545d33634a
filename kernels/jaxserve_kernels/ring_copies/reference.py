"""The definition of copies between a cache's array and a ring's, in plain JAX."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import Array, lax


def from_ring(pages: Array, ring: Array, pairs: Array, *, axis: int) -> Array:
    """Copies slots of a ring into pages: pages[:, page] = ring[slot], for each pair.

    Args:
      pages: [..., pages, ...], updated in place when donated.
      ring: [slots, ...], the shape of `pages` without its axis of pages behind that of slots, in
        the same dtype.
      pairs: int32 [2, moves], pages and slots. No page occurs twice, but for pages whose content is
        of no interest.
      axis: of pages.

    Returns:
      The array with these pages overwritten.
    """
    for page, slot in _each(pairs):
        part = lax.dynamic_slice_in_dim(ring, slot, 1)
        pages = lax.dynamic_update_slice_in_dim(pages, jnp.moveaxis(part, 0, axis), page, axis)
    return pages


def to_ring(pages: Array, ring: Array, pairs: Array, *, axis: int) -> Array:
    """Copies pages into slots of a ring, which is returned and updated in place when donated. As
    `from_ring`; no slot occurs twice, but for slots whose content is of no interest."""
    for page, slot in _each(pairs):
        part = jnp.moveaxis(lax.dynamic_slice_in_dim(pages, page, 1, axis), axis, 0)
        ring = lax.dynamic_update_slice_in_dim(ring, part, slot, 0)
    return ring


def _each(pairs: Array) -> Iterator[tuple[Array, Array]]:
    """Yields the page and the slot of each move. A loop on the device takes twice as long: its
    copies are launched one by one (lab/logs/offload.md)."""
    return ((pairs[0, number], pairs[1, number]) for number in range(pairs.shape[1]))
