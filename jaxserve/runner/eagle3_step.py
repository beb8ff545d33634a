"""What an EAGLE-3 head adds to the steps of its target model.

The entry at position i needs the state there and the token after it. So a step computes with each
token the entry before that. The state of each sequence's newest token stays on the device for the
step after. `sequence_state.HEAD_STATE` says whose it is: behind a cached prefix there is none, and
the prefix's last entry remains that of whoever computed the prefix and went on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxserve.models.drafts import eagle3
from jaxserve.models.drafts.eagle3 import Eagle3Params
from jaxserve.models.drafts.places import Ends, places_of
from jaxserve.models.drafts.spec import Eagle3Draft
from jaxserve.models.layer import Caches, StepTokens
from jaxserve.runner.sequence_state import HEAD_STATE
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


def write_entries(
    params: Eagle3Params,
    draft: Eagle3Draft,
    embedding: Weight,
    kv: Caches,
    tokens: StepTokens,
    states: Array,
    kept: Array,
    sequences: Array,
    *,
    first: int,
    target: Target,
) -> Caches:
    """Store the entry before each of a step's tokens.

    Args:
      embedding: the target's [vocab, embed].
      states: [tokens, embed], see `eagle3.states`.
      kept: [slots + 1, embed], see `keep`.
      sequences: see `sequence_state`.
      first: where the head's layer lies in the first cache.
    """
    place, cache = tokens.places[0], kv[0]
    assert isinstance(cache, Array)
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
    places = StepTokens(tokens.ids, (entries,))
    return eagle3.store(params, draft, embedding, kv, places, before, first=first, target=target)


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
    params: Eagle3Params,
    draft: Eagle3Draft,
    embedding: Weight,
    kv: Caches,
    page_table: Array,
    ends: Ends,
    states: Array,
    choose: Callable[[Array, int], Array],
    *,
    first: int,
    most: int,
    target: Target,
) -> tuple[Array, Array, Caches]:
    """Draft one token after the other behind the rows' last tokens.

    Args:
      page_table: of the first cache, int32 [slots + 1, pages_per_seq].
      states: [rows, embed], of the tokens before the last ones.
      choose: takes scores, float32 [rows, vocab], and the draft's number.

    Returns:
      See `draft_step.draft_ahead`.
    """
    cache = kv[0]
    assert isinstance(cache, Array)
    ids, drafts = ends.last, list[Array]()
    for number in range(most):
        at = ends.position - 1 + number
        places = places_of(
            at < ends.held, ends.slots, at, at, page_table, page_size=page_size(cache)
        )
        hidden, states, kv = eagle3.extend(
            *(params, draft, embedding, kv, StepTokens(ids, (places,)), states),
            first=first,
            tile_size=1,
            target=target,
        )
        ids = choose(eagle3.scores(params, draft, hidden, target=target), number)
        drafts.append(ids)
    count = jnp.where(ends.held > ends.position, ends.held - ends.position + 1, 0)
    return jnp.stack(drafts, axis=1), jnp.clip(count, 0, most), kv
