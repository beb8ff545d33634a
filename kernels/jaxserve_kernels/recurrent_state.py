"""The state of recurrent layers, and the slots and positions of a step's tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class RecurrentState(NamedTuple):
    """The state of all recurrent layers, of a fixed size per slot.

    A row that begins at position 0 ignores its slot's content and begins with zeros. So nobody has
    to clear a slot for a new sequence.
    """

    conv: Array
    """[layers, slots, width - 1, channels], in the dtype of activations: the last inputs of the
    convolution, the oldest first."""
    delta: Array
    """float32 [layers, slots, value_heads, key_dim, value_dim]."""


class Kept(NamedTuple):
    """A state within each row that is also stored in another slot, int32 [rows]."""

    tokens: Array
    """After how many of the row's tokens, at the end of a block; 0: none is."""
    slots: Array


MOST_PROMPTS = 16
"""The most rows of a step that have blocks. Kernels need scratch memory for each."""


class Chunks(NamedTuple):
    """The rows that have blocks, int32 [at most MOST_PROMPTS]. After the last one, chunks have no
    tokens."""

    first: Array
    slots: Array
    positions: Array
    blocked: Array
    """Tokens that are computed in blocks: the row's first ones."""
    kept: Kept

    @classmethod
    def of(cls, rows: Rows, kept: Kept) -> Chunks:
        """The rows with blocks among `rows`. A grid over all rows would mostly have programs
        without work."""
        assert rows.blocked is not None
        most = min(rows.first.shape[0], MOST_PROMPTS)
        has = rows.blocked > 0
        place = jnp.where(has, jnp.cumsum(has) - 1, most)
        which = jnp.zeros(most, jnp.int32).at[place].set(jnp.arange(has.size), mode="drop")
        there = jnp.arange(most) < jnp.sum(has)
        return cls(
            first=rows.first[which],
            slots=rows.slots[which],
            positions=rows.positions[which],
            blocked=jnp.where(there, rows.blocked[which], 0),
            kept=Kept(jnp.where(there, kept.tokens[which], 0), kept.slots[which]),
        )


class Rows(NamedTuple):
    """Rows of a step, int32 [rows]: each is consecutive tokens of one sequence. A slot has at most
    one row, except for the padding slot, whose state is meaningless."""

    first: Array
    """Index of the row's first token in the step."""
    length: Array
    """0 for padding."""
    slots: Array
    positions: Array
    """Position of the row's first token in its sequence; 0 for padding."""
    blocked: Array | None = None
    """How many of the row's leading tokens are computed in blocks (`RecurrentStep.of_rows`). At
    most MOST_PROMPTS rows have any. None: no row has."""
    chunks: Chunks | None = None
    """The rows with blocks, if there is a `blocked`."""

    def with_kept(self) -> Rows:
        """These rows, then the beginnings of chunks up to the states that are kept, as rows of the
        slots that keep them."""
        if self.chunks is None:
            return self
        kept = self.chunks.kept
        return Rows(
            first=jnp.concatenate([self.first, self.chunks.first]),
            length=jnp.concatenate([self.length, kept.tokens]),
            slots=jnp.concatenate([self.slots, kept.slots]),
            positions=jnp.concatenate([self.positions, self.chunks.positions]),
        )


class RecurrentStep(NamedTuple):
    """Slots, positions and rows of a step's tokens. All arrays are int32. Padding tokens are at
    position 0 of the padding slot."""

    slots: Array  # [tokens]
    positions: Array  # [tokens]
    rows: Rows

    @classmethod
    def of_decode(cls, slots: Array, positions: Array, padding_slot: int) -> RecurrentStep:
        """A step in which each token is a row."""
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
        kept: Kept | None = None,
    ) -> RecurrentStep:
        """A step whose rows follow each other.

        A prompt is cut into blocks of `block` positions, of which the last may be shorter. The
        blocks that a row contains are computed as such, unless the last one is a single token,
        which may also come in a decode step. Such a row begins at a multiple of `block`, and ends
        at one or not before the end of the prompt.

        Args:
          slots, positions: slot and position of each token.
          row_slots: slot of each row; padding rows come last.
          last: index of each row's last token, 0 for padding.
          prompts: int32 [rows], tokens of each row's prompt; None: nothing is computed in blocks.
          kept: states within rows that are stored in further slots.
        """
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1] + 1])
        length = jnp.maximum(last - first + 1, 0)
        # Padding rows are of the same slot as padding tokens, whose offset is then 0.
        start = jnp.where(length > 0, positions[first], 0)
        rows = Rows(first, length, row_slots, start)
        if prompts is None:
            return cls(slots, positions, rows)
        single = (prompts % block == 1).astype(jnp.int32)
        blocked = jnp.clip(prompts - single - start, 0, length)
        rows = rows._replace(blocked=blocked)
        kept = kept or Kept(jnp.zeros_like(length), row_slots)
        chunks = Chunks.of(rows, kept)
        return cls(slots, positions, rows._replace(chunks=chunks))

    def cut(self, lengths: Array, padding_slot: int) -> RecurrentStep:
        """A step with only the first `lengths` tokens of each row, int32 [rows], at most the row's
        own length. The other tokens become padding. Nothing is computed in blocks."""
        inside = jnp.zeros(padding_slot + 1, jnp.int32).at[self.rows.slots].set(lengths)
        kept = self.offsets(padding_slot + 1) < inside[self.slots]
        return RecurrentStep(
            jnp.where(kept, self.slots, padding_slot),
            jnp.where(kept, self.positions, 0),
            self.rows._replace(length=lengths, blocked=None, chunks=None),
        )

    def offsets(self, num_slots: int) -> Array:
        """Index of each token in its row, int32 [tokens]."""
        start = jnp.zeros(num_slots, jnp.int32).at[self.rows.slots].set(self.rows.positions)
        return self.positions - start[self.slots]
