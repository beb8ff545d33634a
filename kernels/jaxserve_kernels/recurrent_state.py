"""What recurrent layers keep of a sequence's past, and where the tokens of a step belong in it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class RecurrentState(NamedTuple):
    """State of a fixed size per slot, in all recurrent layers.

    A row of a step that begins at position 0 begins with zeros, whatever its slot holds: nothing
    has to be cleared for a new sequence.
    """

    conv: Array
    """[layers, slots, width - 1, channels], in the dtype of activations: the last inputs of the
    convolution, the oldest first."""
    delta: Array
    """float32 [layers, slots, value_heads, key_dim, value_dim]."""


class Rows(NamedTuple):
    """Consecutive tokens of one sequence each, int32 [rows]. A slot has one row at most, but for
    the padding slot, whose state means nothing."""

    first: Array
    """Index of the row's first token in the step."""
    length: Array
    """0 for padding."""
    slots: Array
    positions: Array
    """Of the row's first token in its sequence."""
    blocked: Array | None = None
    """How many of the row's tokens, from its first on, are computed in blocks
    (`RecurrentStep.of_rows`); None: of no row any."""


class RecurrentStep(NamedTuple):
    """Where the tokens of a step belong. All arrays int32; padding tokens belong to the padding
    slot, at position 0."""

    slots: Array  # [tokens]
    positions: Array  # [tokens]
    rows: Rows

    @classmethod
    def of_decode(cls, slots: Array, positions: Array, padding_slot: int) -> RecurrentStep:
        """Of a step in which each token is a row."""
        first = jnp.arange(slots.shape[0], dtype=jnp.int32)
        length = (slots != padding_slot).astype(jnp.int32)
        return cls(slots, positions, Rows(first, length, slots, positions))

    @classmethod
    def of_rows(
        cls,
        slots: Array,
        positions: Array,
        row_slots: Array,
        last: Array,
        prompts: Array | None = None,
        block: int = 1,
    ) -> RecurrentStep:
        """Of a step whose rows follow each other.

        Positions of a prompt are computed in blocks: from each multiple of `block` on so many at
        once, as long as the prompt fills them. A row begins and ends at a multiple of `block` as
        far as blocks go.

        Args:
          slots, positions: of each token.
          row_slots: of each row; those of padding come last.
          last: index of each row's last token, 0 for padding.
          prompts: int32 [rows], tokens of each row's prompt; None: nothing is computed in blocks.
        """
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1] + 1])
        length = jnp.maximum(last - first + 1, 0)
        start, blocked = positions[first], None
        if prompts is not None:
            blocked = jnp.clip(prompts // block * block - start, 0, length) // block * block
        return cls(slots, positions, Rows(first, length, row_slots, start, blocked))

    def cut(self, lengths: Array, padding_slot: int) -> RecurrentStep:
        """Of the first tokens of each row: int32 [rows], at most so many as it has. The others
        become padding. Nothing is computed in blocks."""
        inside = jnp.zeros(padding_slot + 1, jnp.int32).at[self.rows.slots].set(lengths)
        kept = self.offsets(padding_slot + 1) < inside[self.slots]
        return RecurrentStep(
            jnp.where(kept, self.slots, padding_slot),
            jnp.where(kept, self.positions, 0),
            self.rows._replace(length=lengths, blocked=None),
        )

    def offsets(self, num_slots: int) -> Array:
        """Index of each token in its row, int32 [tokens]."""
        start = jnp.zeros(num_slots, jnp.int32).at[self.rows.slots].set(self.rows.positions)
        return self.positions - start[self.slots]
