"""Runs a small draft model inside the steps of its target model.

The draft model computes each token that the target computes. So its cache holds the same tokens,
and sequences that share pages of the target share the draft part too, see `draft_cache`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxserve.models import decoder
from jaxserve.models.drafts.places import Ends, only_cache, places_of
from jaxserve.models.drafts.spec import ModelDraft
from jaxserve.models.layer import StepTokens
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.target import Target


def write_tokens(
    params: decoder.Params,
    draft: ModelDraft,
    cache: Array,
    tokens: StepTokens,
    *,
    tile_size: int | None,
    target: Target,
) -> Array:
    """Returns the draft model's cache with a step's tokens.

    Args:
      tokens: with their places in the draft model's cache.
      tile_size: None for a decode step, with one token per sequence.
    """
    own = (params, (cache,), tokens, draft.body)
    if tile_size is None:
        _, kv = decoder.decode(*own, target=target)
    else:
        _, kv = decoder.forward(*own, tile_size=tile_size, target=target)
    return only_cache(kv)


def draft_tokens(
    params: decoder.Params,
    draft: ModelDraft,
    cache: Array,
    page_table: Array,
    ends: Ends,
    choose: Callable[[Array, int], Array],
    *,
    vocab: int,
    most: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Draft the tokens after each row's last token, one at a time.

    Args:
      page_table: the draft cache's, int32 [slots + 1, pages_per_seq].
      choose: takes scores, float32 [rows, vocab], and the draft's number; returns token ids.
      vocab: size of the target's vocabulary.

    Returns:
      See `draft_step.draft_ahead`.
    """
    ids, drafts = ends.last, list[Array]()
    for number in range(most):
        at = ends.position + number
        places = places_of(
            at < ends.held, ends.slots, at, at, page_table, page_size=page_size(cache)
        )
        own = (params, (cache,), StepTokens(ids, (places,)), draft.body)
        hidden, kv = decoder.decode(*own, target=target)
        cache = only_cache(kv)
        scores = decoder.logits(params, hidden, target=target)[:, :vocab]
        missing = vocab - scores.shape[1]
        scores = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        ids = choose(scores, number)
        drafts.append(ids)
    return jnp.stack(drafts, axis=1), jnp.clip(ends.held - ends.position, 0, most), cache
