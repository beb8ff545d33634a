"""Native multi-token prediction of Qwen3.5: a layer of the checkpoint that drafts token by token.

The cache entry at position i combines the model's state at i with the token at i + 1::

    state = hidden state after the final norm        # later passes: the head's own, after its norm
    x = fc(concat(rms(embed(token i + 1), embedding_norm), rms(state, hidden_norm)))
    y = decoder layer(x), with separate keys and values
    scores of token i + 2 = the model's output matrix @ rms(y, final_norm)

(vLLM's qwen3_5_mtp.py. Only the acceptance rate shows that the state must come after the model's
final norm: llama.cpp 24025 and LightLLM 1402 measured both.) So an entry needs the token after its
position, as with EAGLE-3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import CachePlace
from jaxserve.models import decoder
from jaxserve.models.attention import prologue_heads
from jaxserve.models.drafts.places import only_cache
from jaxserve.models.drafts.spec import MtpDraft
from jaxserve.models.layer import Norm, StepTokens, decoder_layer
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.models.rope import step_tables
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs
from jaxserve_kernels.gated_attention import attention_prologue, no_rotation
from jaxserve_kernels.matmul import linear, plain, sum_parts, take_rows
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


class MtpParams(NamedTuple):
    """The weights of a head. Norms are float32 with 1 added, as in the model. Matrices are
    [out, in], as on disk, or quantised."""

    fc: Weight  # [embed, 2 * embed]: columns for embeddings, then for states
    embedding_norm: Array  # [embed]
    hidden_norm: Array  # [embed]
    layers: tuple[Layer]
    final_norm: Array  # [embed]


def abstract(draft: MtpDraft, dtype: DTypeLike) -> MtpParams:
    """Shapes and dtypes of the parameters."""
    body, whole = draft.body, decoder.abstract(draft.body, dtype)
    (layer,), norm = layer_views(whole.layers), whole.final_norm
    fc: Any = jax.ShapeDtypeStruct((body.embed, 2 * body.embed), dtype)
    return MtpParams(fc, norm, norm, (layer,), norm)


def store(
    params: MtpParams,
    draft: MtpDraft,
    embedding: Weight,
    cache: Array,
    tokens: StepTokens,
    state: Array,
    *,
    target: Target,
) -> Array:
    """Writes the keys and values of entries into the head's cache. Like `extend`, but without
    attention, which they do not depend on."""
    (layer,), places, body = params.layers, tokens.places[0], draft.body
    assert layer.qkv is not None
    x, normed = _inputs(params, draft, embedding, tokens.ids, state, target=target)
    (tables,) = step_tables(body, tokens.positions)
    with jax.named_scope("draft_entries"):
        qkv, _ = attention_prologue(
            linear(normed, layer.qkv, target=target),
            HeadWeights(layer.q_norm, layer.k_norm),
            tables,
            heads=prologue_heads(body),
            eps=body.norm_eps,
            dtype=x.dtype,
            target=target,
        )
        _, cache = attention_inputs(
            qkv,
            cache,
            0,
            HeadWeights(),
            no_rotation(qkv.shape[1], body.attention.head_dim, target=target),
            KVSlots(places.pages, places.offsets),
            eps=body.norm_eps,
            dtype=x.dtype,
            target=target,
        )
    return cache


def _inputs(
    params: MtpParams,
    draft: MtpDraft,
    embedding: Weight,
    ids: Array,
    state: Array,
    *,
    target: Target,
) -> tuple[Array, Array]:
    """Returns the layer's input before and after its norm, [tokens, embed] each."""
    eps = draft.body.norm_eps
    embedded = rms_norm(take_rows(embedding, ids, state.dtype), params.embedding_norm, eps)
    both = jnp.concatenate([embedded, rms_norm(state, params.hidden_norm, eps)], axis=-1)
    x = sum_parts(linear(both, params.fc, target=target), state.dtype)
    return x, rms_norm(x, params.layers[0].attention_norm, eps)


def extend(
    params: MtpParams,
    draft: MtpDraft,
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
      embedding: the model's [vocab, embed].
      tokens: places of the entries, with the ids of the next tokens.
      state: [tokens, embed], of the tokens at the entries' positions.

    Returns:
      Hidden states after the final norm [tokens, embed], the same states for the next pass, and the
      head's cache.
    """
    x, normed = _inputs(params, draft, embedding, tokens.ids, state, target=target)
    (tables,) = step_tables(draft.body, tokens.positions)
    _, normed, kv = decoder_layer(
        params.layers[0],
        Norm(params.final_norm),
        CachePlace(0, 0),
        *(x, normed, (cache,), tables, tokens, draft.body),
        tile_size=tile_size,
        target=target,
    )
    hidden = plain(normed)
    return hidden, hidden, only_cache(kv)
