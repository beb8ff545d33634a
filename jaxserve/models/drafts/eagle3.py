"""EAGLE-3: one layer that drafts token by token.

The cache entry at position i combines the target's state at i with the token at i + 1::

    state = fc(concat(taps))                       # later passes: the layer's own output
    x = concat(rms(embed(token i + 1)), rms(state, hidden_norm))
    y = state + attention(x);  y = y + mlp(rms(y))
    scores of token i + 2 = head(rms(y, norm))

(Li et al. 2025, arXiv 2503.01840.) So an entry needs the token after its position. The last entry
of a shared page comes from the sequence that continued it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import CachePlace
from jaxserve.models import decoder
from jaxserve.models.drafts.places import only_cache
from jaxserve.models.drafts.spec import Eagle3Draft
from jaxserve.models.layer import Norm, StepTokens, decoder_layer
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.models.rope import step_tables
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs
from jaxserve_kernels.matmul import linear, plain, sum_parts, take_rows
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


class Eagle3Params(NamedTuple):
    """The weights of a head. Matrices are [out, in], as on disk."""

    fc: Array  # [embed, taps * embed]
    hidden_norm: Array  # [embed], of states
    layer: Layer  # attention_norm is of embeddings, qkv [qkv_size, 2 * embed]
    final_norm: Array  # [embed]
    lm_head: Array  # [draft vocab, embed]
    token_ids: Array | None  # int32 [draft vocab]: the target's ids; None: the same


def abstract(draft: Eagle3Draft, dtype: DTypeLike) -> Eagle3Params:
    """Shapes and dtypes of the parameters."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    body = draft.body
    layer = layer_views(decoder.abstract(body, dtype).layers)[0]
    ids: Any = jax.ShapeDtypeStruct((body.vocab_size,), jnp.int32)
    return Eagle3Params(
        fc=array(body.embed, len(draft.taps) * body.embed),
        hidden_norm=array(body.embed),
        layer=layer._replace(qkv=array(body.attention.qkv_size, 2 * body.embed)),
        final_norm=array(body.embed),
        lm_head=array(body.vocab_size, body.embed),
        token_ids=ids if draft.reduced_vocab else None,
    )


def states(params: Eagle3Params, tapped: Sequence[Array], *, target: Target) -> Array:
    """Returns the target's states as the first pass reads them, [tokens, embed].

    Args:
      tapped: hidden states [tokens, embed] after each of `Eagle3Draft.taps`.
    """
    x = jnp.concatenate(tapped, axis=-1)
    return sum_parts(linear(x, params.fc, target=target), x.dtype)


def store(
    params: Eagle3Params,
    draft: Eagle3Draft,
    embedding: Weight,
    cache: Array,
    tokens: StepTokens,
    state: Array,
    *,
    target: Target,
) -> Array:
    """Writes the keys and values of entries into the head's cache. Like `extend`, but without
    attention, which they do not depend on."""
    layer, places = params.layer, tokens.places[0]
    assert layer.qkv is not None
    both, _ = _inputs(params, draft, embedding, tokens.ids, state)
    (tables,) = step_tables(draft.body, tokens.positions)
    with jax.named_scope("draft_entries"):
        _, cache = attention_inputs(
            linear(both, layer.qkv, target=target),
            cache,
            0,
            HeadWeights(layer.q_norm, layer.k_norm),
            tables,
            KVSlots(places.pages, places.offsets),
            eps=draft.body.norm_eps,
            dtype=both.dtype,
            target=target,
        )
    return cache


def _inputs(
    params: Eagle3Params, draft: Eagle3Draft, embedding: Weight, ids: Array, state: Array
) -> tuple[Array, Array]:
    """Returns the input of the QKV projection, [tokens, 2 * embed], and the normed state."""
    eps = draft.body.norm_eps
    embedded = take_rows(embedding, ids, params.final_norm.dtype)
    normed_state = rms_norm(state, params.hidden_norm, eps)
    embedded = rms_norm(embedded, params.layer.attention_norm, eps)
    return jnp.concatenate([embedded, normed_state], axis=-1), normed_state


def extend(
    params: Eagle3Params,
    draft: Eagle3Draft,
    embedding: Weight,
    cache: Array,
    tokens: StepTokens,
    state: Array,
    *,
    tile_size: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Compute entries and store their keys and values.

    Args:
      embedding: the target's [vocab, embed].
      tokens: places of the entries, with the ids of the next tokens.
      state: [tokens, embed], of the tokens at the entries' positions.

    Returns:
      Hidden states after the final norm and the states that the next pass reads, [tokens, embed]
      each, and the head's cache.
    """
    body, layer = draft.body, params.layer
    both, normed_state = _inputs(params, draft, embedding, tokens.ids, state)
    (tables,) = step_tables(body, tokens.positions)
    x, normed, kv = decoder_layer(
        layer,
        Norm(params.final_norm),
        CachePlace(0, 0),
        normed_state if draft.norm_before_residual else state,
        both,
        *((cache,), tables, tokens, body),
        tile_size=tile_size,
        target=target,
    )
    return plain(normed), x, only_cache(kv)


def scores(params: Eagle3Params, draft: Eagle3Draft, hidden: Array, *, target: Target) -> Array:
    """Returns the scores of the target's tokens, float32 [rows, vocab]; -inf for tokens outside the
    drafts' vocabulary.

    Args:
      hidden: [rows, embed], after the final norm.
    """
    own = sum_parts(linear(hidden, params.lm_head, jnp.float32, target=target), jnp.float32)
    if params.token_ids is None:
        return own
    nothing = jnp.full((own.shape[0], draft.target_vocab), -jnp.inf)
    return nothing.at[:, params.token_ids].set(own, unique_indices=True)
