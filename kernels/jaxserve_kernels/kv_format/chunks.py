"""Chunks of prompts over a quantised cache: their contexts in full precision for one step.

A chunk reads its context once for every query tile, and codes would be converted as often. So the
pages that a step's chunks see are converted once per layer, into a scratch cache of the dense
format, and attention over that is `paged_attention`. Which pages those are is data: the scratch has
a fixed size, and the scheduler keeps a step's chunks within it (`capacity`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import Target

LEAST = 65_536
"""Tokens that the chunks of a step may see together, where no sequence is longer."""


def programs(kv_heads: int, *, target: Target) -> int:
    """How many convert the pages of one head, in turn."""
    return max(1, 4 * target.gpu.multiprocessors // kv_heads)


def capacity(max_model_len: int) -> int:
    """Tokens, in whole pages, that all chunks of one step may see together."""
    return max(LEAST, max_model_len)


class Chunks(NamedTuple):
    """The chunks of a step by slot; int32 [slots], 0 where a slot has none."""

    start: Array
    """Position of the chunk's first token."""
    end: Array
    """Position after its last token: its context."""
    shift: Array
    """What added to a position gives the token's number within the step."""


def of_tiles(tiles: QueryTiles, slots: int) -> Chunks:
    """The chunks that the tiles are cut from."""
    slot = jnp.where(tiles.length > 0, tiles.slot, slots)
    nothing = jnp.zeros(slots, jnp.int32)
    end = nothing.at[slot].max(tiles.position + tiles.length, mode="drop")
    far = jnp.iinfo(jnp.int32).max
    start = jnp.full(slots, far, jnp.int32).at[slot].min(tiles.position, mode="drop")
    shift = nothing.at[slot].set(tiles.first - tiles.position, mode="drop")
    return Chunks(jnp.where(end > 0, start, 0), end, shift)


class Places(NamedTuple):
    """Places of the scratch, given to slots one after the other."""

    first: Array
    """[slots]: number of the slot's first place."""
    taken: Array
    """[1]: how many are given."""
    slot: Array
    """[places]: whose it is; any slot, if nobody's."""
    number: Array
    """[places]: its number among the slot's."""


def divide(counts: Array, places: int) -> Places:
    """Give each slot so many of the `places`."""
    stop = jnp.cumsum(counts, dtype=jnp.int32)
    first = stop - counts
    place = jnp.arange(places, dtype=jnp.int32)
    before = jnp.sum(place[:, None] >= stop[None, :], axis=1, dtype=jnp.int32)
    slot = jnp.minimum(before, counts.shape[0] - 1)
    return Places(first, jnp.minimum(stop[-1:], places), slot, place - first[slot])


def cut_at_pages(tiles: QueryTiles, page_size: int) -> QueryTiles:
    """The tiles without what lies past the end of their first page, then that of those that have
    any: padding comes last, as attention expects it."""
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
