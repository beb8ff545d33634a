"""What a small draft model adds to the steps of its target model.

It computes each token that the target computes. So its cache holds the same tokens, and whoever
shares the target's pages shares those of the draft model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.models import decoder
from jaxserve.models.drafts.places import Ends, places_of
from jaxserve.models.drafts.spec import ModelDraft
from jaxserve.models.layer import StepTokens
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.target import Target


def write_tokens(
    params: decoder.Params,
    draft: ModelDraft,
    cache: Any,
    tokens: StepTokens,
    *,
    tile_size: int | None,
    target: Target,
) -> Any:
    """Returns the draft model's cache with a step's tokens.

    Args:
      tile_size: None: each token is the next one of its sequence.
    """
    own = (params, (cache,), tokens._replace(places=tokens.places[:1]), draft.body)
    if tile_size is None:
        _, (cache,) = decoder.decode(*own, target=target)
    else:
        _, (cache,) = decoder.forward(*own, tile_size=tile_size, target=target)
    return cache


def draft_tokens(
    params: decoder.Params,
    draft: ModelDraft,
    cache: Any,
    page_table: Array,
    ends: Ends,
    choose: Callable[[Array, int], Array],
    *,
    vocab: int,
    most: int,
    target: Target,
) -> tuple[Array, Array, Any]:
    """Draft one token after the other behind the rows' last tokens.

    Args:
      page_table: of the first cache, int32 [slots + 1, pages_per_seq].
      choose: takes scores, float32 [rows, vocab], and the draft's number.
      vocab: the target's.

    Returns:
      See `draft_step.draft_ahead`; in place of kv the draft model's cache.
    """
    ids, drafts = ends.last, list[Array]()
    for number in range(most):
        at = ends.position + number
        places = places_of(
            at < ends.held, ends.slots, at, at, page_table, page_size=page_size(cache)
        )
        own = (params, (cache,), StepTokens(ids, (places,)), draft.body)
        hidden, (cache,) = decoder.decode(*own, target=target)
        scores = decoder.logits(params, hidden, target=target)[:, :vocab]
        missing = vocab - scores.shape[1]
        scores = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        ids = choose(scores, number)
        drafts.append(ids)
    return jnp.stack(drafts, axis=1), jnp.clip(ends.held - ends.position, 0, most), cache
