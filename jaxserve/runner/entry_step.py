"""Runs EAGLE-3 and MTP heads, whose cache entries need the next token, inside the steps.

The entry at position i needs the hidden state at i and the token at i + 1. So a step writes, for
each of its tokens, the entry of the position before. The hidden state of each sequence's newest
token stays on the device for the next step; `sequence_state.HEAD_STATE` holds its position plus 1.
After a cached prefix there is no such state. The last entry of the prefix is then the one of the
sequence that computed the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve.models.drafts.places import Ends, places_of
from jaxserve.models.layer import StepTokens
from jaxserve.runner.sequence_state import HEAD_STATE
from jaxserve_kernels.kv_format import page_size


class EntryHead(NamedTuple):
    """The functions of a head. They take entries as places with the ids of the next tokens, and the
    hidden states at the entries' positions, [tokens, embed]."""

    store: Callable[[Array, StepTokens, Array], Array]
    """See `eagle3.store`, `mtp.store`."""
    extend: Callable[[Array, StepTokens, Array], tuple[Array, Array, Array]]
    """See `eagle3.extend`, `mtp.extend`; each entry is a query tile."""
    scores: Callable[[Array], Array]
    """Returns scores of the model's tokens, [rows, vocab], from states after the final norm."""


def write_entries(
    head: EntryHead, cache: Array, tokens: StepTokens, states: Array, kept: Array, sequences: Array
) -> Array:
    """Returns the head's cache with the entry before each of a step's tokens.

    Args:
      states: [tokens, embed], the model's hidden states as the head reads them.
      kept: [slots + 1, embed], see `keep`.
      sequences: see `sequence_state`.
    """
    place = tokens.places[0]
    slots, positions = place.slots, place.positions
    follows = (slots == jnp.roll(slots, 1)) & (positions == jnp.roll(positions, 1) + 1)
    follows = follows.at[0].set(False)
    is_kept = (positions > 0) & (sequences[slots, HEAD_STATE] == positions)
    before = jnp.where(follows[:, None], jnp.roll(states, 1, axis=0), kept[slots])
    entries = places_of(
        follows | is_kept,
        *(slots, positions - 1, positions - 1, place.page_table),
        page_size=page_size(cache),
    )
    return head.store(cache, StepTokens(tokens.ids, (entries,)), before)


def keep(
    kept: Array, sequences: Array, states: Array, last: Array, slots: Array, lengths: Array
) -> tuple[Array, Array]:
    """Keeps the hidden state of each row's last token for the next step.

    Args:
      kept: [slots + 1, embed], the states kept so far.
      states: [tokens, embed], of a step.
      last: int32 [rows], index of each row's last token in `states`.
      slots: int32 [rows]; the padding slot for rows without tokens.
      lengths: int32 [rows], tokens of the sequence up to and including the last one.

    Returns:
      The kept states, and `sequences` with the new `HEAD_STATE`.
    """
    sequences = sequences.at[slots, HEAD_STATE].set(lengths)
    return kept.at[slots].set(states[last].astype(kept.dtype)), sequences


def draft_tokens(
    head: EntryHead,
    cache: Array,
    page_table: Array,
    ends: Ends,
    states: Array,
    choose: Callable[[Array, int], Array],
    *,
    most: int,
) -> tuple[Array, Array, Array]:
    """Draft the tokens after each row's last token, one at a time.

    Args:
      page_table: the draft cache's, int32 [slots + 1, pages_per_seq].
      states: [rows, embed], of the tokens before the last ones.
      choose: takes scores, float32 [rows, vocab], and the draft's number; returns token ids.

    Returns:
      See `draft_step.draft_ahead`.
    """
    ids, drafts = ends.last, list[Array]()
    for number in range(most):
        at = ends.position - 1 + number
        places = places_of(
            at < ends.held, ends.slots, at, at, page_table, page_size=page_size(cache)
        )
        hidden, states, cache = head.extend(cache, StepTokens(ids, (places,)), states)
        ids = choose(head.scores(hidden), number)
        drafts.append(ids)
    count = jnp.where(ends.held > ends.position, ends.held - ends.position + 1, 0)
    return jnp.stack(drafts, axis=1), jnp.clip(count, 0, most), cache
