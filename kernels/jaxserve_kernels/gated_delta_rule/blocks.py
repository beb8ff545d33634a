"""The blocks that a step has of its prompts: see `recurrent_state.RecurrentStep.of_rows`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.recurrent_state import Chunks, RecurrentStep


class Blocks(NamedTuple):
    """A step's blocks, int32 [whole blocks of its tokens + chunks]. Entries past their number are
    undefined."""

    first: Array
    """Index of the block's first token in the step."""
    length: Array
    """Tokens of the block: fewer than others have in a prompt's last one."""
    slots: Array
    positions: Array
    """Position of that token in its sequence."""
    kept: Array
    """The slot that also gets the state after the block: `slots`, if there is no other."""


def blocks_of(chunks: Chunks, block: int, most: int) -> tuple[Blocks, Array]:
    """Returns the at most `most` blocks of a step's chunks, in their order, and their number.

    Args:
      block: tokens per block.
    """
    counts = counts_of(chunks, block)
    ends = jnp.cumsum(counts)
    number = jnp.arange(most, dtype=jnp.int32)
    # Not by bisection: that is a loop, which would interrupt the CUDA graph.
    row = jnp.searchsorted(ends, number, side="right", method="compare_all")
    row = jnp.minimum(row, counts.shape[0] - 1)
    offset = (number - (ends - counts)[row]) * block
    stored, slots = chunks.kept.tokens[row], chunks.slots[row]
    kept = jnp.where(stored == offset + block, chunks.kept.slots[row], slots)
    length = jnp.minimum(chunks.blocked[row] - offset, block)
    at = (chunks.first[row] + offset, length, slots, chunks.positions[row] + offset, kept)
    return Blocks(*(each.astype(jnp.int32) for each in at)), ends[-1]


def counts_of(chunks: Chunks, block: int) -> Array:
    """The number of each chunk's blocks."""
    return (chunks.blocked + (block - 1)) // block


def most_blocks(tokens: int, chunks: Chunks, block: int) -> int:
    """The most blocks that so many tokens can have: each chunk may have a shorter one."""
    return tokens // block + chunks.first.shape[0]


def in_blocks(step: RecurrentStep, num_slots: int) -> Array:
    """Returns which of a step's tokens are computed in blocks: bool [tokens]."""
    assert step.rows.blocked is not None
    blocked = jnp.zeros(num_slots, jnp.int32).at[step.rows.slots].set(step.rows.blocked)
    return step.offsets(num_slots) < blocked[step.slots]
