"""Prompt chunks over a quantised cache: their contexts are expanded to full precision for one step.

A chunk reads its context once for every query tile, and would convert the codes each time. Instead
each layer converts the pages that the step's chunks see once, into a scratch cache of the dense
format, and runs `paged_attention` over that. The list of pages is data, so the scratch has a fixed
size. The scheduler keeps a step's chunks within it (`capacity`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import Target

LEAST = 65_536
"""Least capacity of the scratch in tokens, used if no sequence is longer."""


def programs(kv_heads: int, *, target: Target) -> int:
    """Number of programs that convert the pages of one KV head, each taking pages in turn."""
    return max(1, 4 * target.gpu.multiprocessors // kv_heads)


def capacity(max_model_len: int) -> int:
    """The most context tokens, counted in whole pages, of all chunks of one step together."""
    return max(LEAST, max_model_len)


class Chunks(NamedTuple):
    """The chunks of a step by slot; int32 [slots], 0 where a slot has none."""

    start: Array
    """Position of the chunk's first token."""
    end: Array
    """Position after its last token: its context."""
    shift: Array
    """Position + shift is the index of a token within the step."""


def of_tiles(tiles: QueryTiles, slots: int) -> Chunks:
    """The chunks that these query tiles cover."""
    slot = jnp.where(tiles.length > 0, tiles.slot, slots)
    nothing = jnp.zeros(slots, jnp.int32)
    end = nothing.at[slot].max(tiles.position + tiles.length, mode="drop")
    far = jnp.iinfo(jnp.int32).max
    start = jnp.full(slots, far, jnp.int32).at[slot].min(tiles.position, mode="drop")
    shift = nothing.at[slot].set(tiles.first - tiles.position, mode="drop")
    return Chunks(jnp.where(end > 0, start, 0), end, shift)


class Places(NamedTuple):
    """Allocation of the scratch: each slot gets consecutive places. All arrays are int32."""

    first: Array
    """[slots]: the slot's first place."""
    taken: Array
    """[1]: number of allocated places."""
    slot: Array
    """[places]: the slot that has the place; any slot for a free place."""
    number: Array
    """[places]: index of the place among those of its slot."""


def divide(counts: Array, places: int) -> Places:
    """Allocates counts[slot] of the `places` to each slot."""
    stop = jnp.cumsum(counts, dtype=jnp.int32)
    first = stop - counts
    place = jnp.arange(places, dtype=jnp.int32)
    before = jnp.sum(place[:, None] >= stop[None, :], axis=1, dtype=jnp.int32)
    slot = jnp.minimum(before, counts.shape[0] - 1)
    return Places(first, jnp.minimum(stop[-1:], places), slot, place - first[slot])


def cut_at_pages(tiles: QueryTiles, page_size: int) -> QueryTiles:
    """Cuts each tile at the end of its first page. The first parts come first, then the non-empty
    second parts. Padding comes last, as attention expects."""
    head = jnp.minimum(tiles.length, page_size - tiles.position % page_size)
    length = jnp.concatenate([head, tiles.length - head])
    number = jnp.cumsum(length > 0, dtype=jnp.int32)
    total = number.shape[0]
    place = jnp.where(length > 0, number - 1, total)
    source = jnp.arange(total, dtype=jnp.int32)
    source = jnp.zeros(total, jnp.int32).at[place].set(source, mode="drop")
    return QueryTiles(
        first=jnp.concatenate([tiles.first, tiles.first + head])[source],
        length=jnp.where(jnp.arange(total) < number[-1], length[source], 0),
        slot=jnp.concatenate([tiles.slot, tiles.slot])[source],
        position=jnp.concatenate([tiles.position, tiles.position + head])[source],
    )
