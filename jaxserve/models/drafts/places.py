"""Places of a head's tokens in the draft cache, and the positions that they attend to."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve.models.layer import Caches
from jaxserve_kernels.kv_format import AttentionStep
from jaxserve_kernels.paged_attention import QueryTiles


class Ends(NamedTuple):
    """Where the rows of a verify step end."""

    slots: Array  # int32 [rows]
    last: Array  # int32 [rows]: the last accepted token, which no step has computed
    position: Array  # int32 [rows]: its position
    held: Array  # int32 [rows]: number of positions that the slot has pages for; 0 for padding


def only_cache(kv: Caches) -> Array:
    """Returns the single, dense cache of a head or draft model."""
    (cache,) = kv
    assert isinstance(cache, Array)
    return cache


def places_of(
    used: Array, slots: Array, positions: Array, sees: Array, page_table: Array, *, page_size: int
) -> AttentionStep:
    """Returns the places of tokens. Each token is its own query tile.

    Args:
      used: bool [tokens]; the others are padding.
      slots, positions: int32 [tokens].
      sees: int32 [tokens], the last position that each attends to.
      page_table: int32 [slots + 1, pages_per_seq]; the last row belongs to padding.
    """
    padding_slot, total = page_table.shape[0] - 1, used.shape[0]
    slots = jnp.where(used, slots, padding_slot)
    positions, sees = jnp.where(used, positions, 0), jnp.where(used, sees, 0)
    place = jnp.where(used, jnp.cumsum(used, dtype=jnp.int32) - 1, total)

    def tiles(values: Array, padding: int) -> Array:
        """One value per token, padding last."""
        return jnp.full(total, padding, jnp.int32).at[place].set(values, mode="drop")

    return AttentionStep(
        slots=slots,
        positions=positions,
        pages=page_table[slots, positions // page_size],
        offsets=positions % page_size,
        tiles=QueryTiles(
            first=tiles(jnp.arange(total), 0),
            length=tiles(used.astype(jnp.int32), 0),
            slot=tiles(slots, padding_slot),
            position=tiles(sees, 0),
        ),
        page_table=page_table,
    )
