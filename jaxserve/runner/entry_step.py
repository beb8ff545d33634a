"""What a head whose entries need the token after them adds to the steps: EAGLE-3, and MTP.

The entry at position i needs the state there and the token after it. So a step computes with each
token the entry before that. The state of each sequence's newest token stays on the device for the
step after. `sequence_state.HEAD_STATE` says whose it is: behind a cached prefix there is none, and
the prefix's last entry remains that of whoever computed the prefix and went on.
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
    """What steps ask of a head. Entries come as their places with the ids of the tokens after them,
    and the states at their positions [tokens, embed]."""

    store: Callable[[Array, StepTokens, Array], Array]
    """See `eagle3.store`, `mtp.store`."""
    extend: Callable[[Array, StepTokens, Array], tuple[Array, Array, Array]]
    """See `eagle3.extend`, `mtp.extend`; each entry is a query tile."""
    scores: Callable[[Array], Array]
    """Of the model's tokens [rows, vocab], from hidden states after the final norm."""


def write_entries(
    head: EntryHead, cache: Array, tokens: StepTokens, states: Array, kept: Array, sequences: Array
) -> Array:
    """Returns the head's cache with the entry before each of a step's tokens.

    Args:
      states: [tokens, embed], those of the model that the head reads.
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
    """Returns the kept states, and the sequence state that says so.

    Args:
      states: [tokens, embed], of a step.
      last: int32 [rows], the row's last token among them.
      slots: int32 [rows]; those of rows without tokens are the padding slot.
      lengths: int32 [rows], tokens of the sequence up to that one.
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
    """Draft one token after the other behind the rows' last tokens.

    Args:
      page_table: of the cache, int32 [slots + 1, pages_per_seq].
      states: [rows, embed], of the tokens before the last ones.
      choose: takes scores, float32 [rows, vocab], and the draft's number.

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
