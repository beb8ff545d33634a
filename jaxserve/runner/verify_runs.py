"""The positions that the rows of a verify step compute, and what a mixed step of them reads."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.runner.batch import DECODE_TOKEN, ROW_MASKED, ROW_SAMPLES, StepInputs
from jaxserve.runner.verify import NO_TOKEN, VerifyInputs, VerifyState


class Runs(NamedTuple):
    """The consecutive positions that each row computes."""

    slots: Array  # int32 [rows]
    begin: Array  # int32 [rows]: the first position
    length: Array  # int32 [rows]: number of positions; 0 for padding
    drafts: Array  # int32 [rows, positions - 1]: drafts after the first position, or NO_TOKEN

    @property
    def used(self) -> Array:
        """Whether a row computes a position: bool [rows, positions]."""
        return jnp.arange(self.drafts.shape[1] + 1) < self.length[:, None]

    def accepted(self, chosen: Array) -> Array:
        """Returns the number of accepted positions of each row, int32 [rows].

        The first position is always accepted. A further one is accepted if the position before it
        is accepted and chose its draft.

        Args:
          chosen: int32 [rows, positions], the sampled tokens.
        """
        hits = (chosen[:, :-1] == self.drafts) & self.used[:, 1:]
        found = 1 + jnp.cumprod(hits.astype(jnp.int32), axis=1).sum(axis=1)
        return jnp.where(self.length > 0, found, 0)


def runs_of(asked: VerifyInputs, state: VerifyState, positions: int, page: int | None) -> Runs:
    """Returns the positions that each row computes. Drafts, bounds and the bucket limit them.

    Args:
      positions: positions per row of the bucket.
      page: tokens per page if a row must stay in the page where it begins; otherwise None.
    """
    slots = asked.row_slots
    begin = jnp.where(asked.row_starts < 0, state.lengths[slots], asked.row_starts)
    first, window = state.draft_first[slots], state.drafts.shape[1]
    index = begin[:, None] + 1 + jnp.arange(positions - 1) - first[:, None]
    there = (first[:, None] > 0) & (index >= 0) & (index < window)
    found = jnp.take_along_axis(state.drafts[slots], jnp.clip(index, 0, window - 1), axis=1)
    drafts = jnp.where(there, found, NO_TOKEN)
    known = jnp.cumprod((drafts >= 0).astype(jnp.int32), axis=1).sum(axis=1)
    end = asked.row_ends
    if page is not None:
        end = jnp.minimum(end, (lax.div(begin, page) + 1) * page)
    most = jnp.minimum(asked.row_positions, 1 + known)
    return Runs(slots, begin, jnp.clip(jnp.minimum(most, end - begin), 0, positions), drafts)


def step_inputs(asked: VerifyInputs, runs: Runs, *, padding_slot: int) -> StepInputs:
    """Returns the inputs of a mixed step. Each run is a chunk, and each position is a row that
    samples. Positions that no run uses are padding."""
    used = runs.used
    rows, positions = used.shape
    step = jnp.arange(positions)
    last = jnp.full((rows, 1), DECODE_TOKEN)
    ids = jnp.where(used, jnp.concatenate([last, runs.drafts], axis=1), 0).reshape(-1)
    slots = jnp.where(used, runs.slots[:, None], padding_slot).reshape(-1)
    flags = asked.row_flags[:, None] | jnp.where(asked.masked != 0, ROW_MASKED, 0)
    nothing = jnp.zeros(0, jnp.int32)
    return StepInputs(
        addresses=asked.addresses,
        values=asked.values,
        token_ids=ids,
        token_slots=slots,
        token_positions=jnp.where(used, runs.begin[:, None] + step, 0).reshape(-1),
        row_slots=slots,
        row_last=jnp.arange(rows * positions),
        row_flags=jnp.where(used, flags | ROW_SAMPLES, 0).reshape(-1),
        row_kept=nothing,
        row_kept_slots=nothing,
        **_tiles(runs, positions, padding_slot),
        decode_first=nothing,
        decode_length=nothing,
        decode_slots=nothing,
        decode_positions=nothing,
    )


def _tiles(runs: Runs, positions: int, padding_slot: int) -> dict[str, Array]:
    """Returns one query tile per run. Padding tiles come last, as attention expects."""
    rows = runs.slots.shape[0]
    real = runs.length > 0
    place = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, rows)

    def moved(values: Array, padding: int) -> Array:
        return jnp.full(rows, padding, jnp.int32).at[place].set(values, mode="drop")

    return {
        "tile_first": moved(positions * jnp.arange(rows), 0),
        "tile_length": moved(runs.length, 0),
        "tile_slots": moved(runs.slots, padding_slot),
        "tile_positions": moved(runs.begin, 0),
    }
