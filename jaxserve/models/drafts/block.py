"""DFlash and DSpark: a block of drafts in one pass over the target's hidden states.

Per token of the target, at every draft layer, with `rms` an RMSNorm::

    context = rms(fc(concat(taps)), hidden_norm)
    keys, values = rope(rms(k(context), k_norm)), v(context)

A block is the last token, followed by mask tokens. It runs through ordinary decoder layers, except
that each token attends to the context and to the whole block (Z-lab's DFlash, DeepSpec's DSpark).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import CachePlace
from jaxserve.models import decoder
from jaxserve.models.drafts.places import only_cache, places_of
from jaxserve.models.drafts.spec import BlockDraft
from jaxserve.models.layer import Caches, Norm, StepTokens, decoder_layer
from jaxserve.models.layer_weights import Layers, layer_views
from jaxserve.models.rope import step_tables, table_of_layer
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs
from jaxserve_kernels.matmul import linear, plain, sum_parts, take_rows
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


class BlockParams(NamedTuple):
    """The weights of a head. Matrices are [out, in], as on disk."""

    fc: Array  # [embed, taps * embed]
    hidden_norm: Array  # [embed]
    layers: Layers  # as in decoder.Params
    final_norm: Array  # [embed]
    markov_in: Array | None  # [vocab, rank]
    markov_out: Array | None  # [vocab, rank]
    confidence: Array | None  # [1, embed], or [1, embed + rank]
    confidence_bias: Array | None  # [1]


type Draw = Callable[[Array, int], Array]
"""Takes scores, float32 [rows, vocab], and the draft's number. Returns token ids, int32 [rows]."""


def abstract(draft: BlockDraft, dtype: DTypeLike, *, stacked: bool = False) -> BlockParams:
    """Shapes and dtypes of the parameters; see `decoder.Params` for `stacked`."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    body, rank = draft.body, draft.markov_rank
    width = body.embed + rank * (draft.confidence == "hidden and markov")
    return BlockParams(
        fc=array(body.embed, len(draft.taps) * body.embed),
        hidden_norm=array(body.embed),
        layers=decoder.abstract(body, dtype, stacked=stacked).layers,
        final_norm=array(body.embed),
        markov_in=array(body.vocab_size, rank) if rank else None,
        markov_out=array(body.vocab_size, rank) if rank else None,
        confidence=array(1, width) if draft.confidence else None,
        confidence_bias=array(1) if draft.confidence else None,
    )


def write_context(
    params: BlockParams,
    draft: BlockDraft,
    cache: Array,
    tapped: Sequence[Array],
    tokens: StepTokens,
    *,
    target: Target,
) -> Array:
    """Writes the keys and values of the target's tokens, which later blocks attend to, into the
    head's cache. A position that is computed again is overwritten.

    Args:
      cache: the head's cache, in the dense format.
      tapped: hidden states [tokens, embed] after each of `draft.taps`.
    """
    body, places = draft.body, tokens.places[0]
    x = jnp.concatenate(tapped, axis=-1)
    x = sum_parts(linear(x, params.fc, target=target), x.dtype)
    context = rms_norm(x, params.hidden_norm, body.norm_eps)
    tables = step_tables(body, tokens.positions)
    for index, layer in enumerate(layer_views(params.layers)):
        assert layer.qkv is not None
        with jax.named_scope(f"draft_context_{index}"):
            _, cache = attention_inputs(
                linear(context, layer.qkv, target=target),
                cache,
                index,
                HeadWeights(layer.q_norm, layer.k_norm),
                tables[table_of_layer(body, index)],
                KVSlots(places.pages, places.offsets),
                eps=body.norm_eps,
                dtype=context.dtype,
                target=target,
            )
    return cache


def block_tokens(
    draft: BlockDraft,
    last: Array,
    slots: Array,
    begin: Array,
    count: Array,
    page_table: Array,
    *,
    page_size: int,
) -> StepTokens:
    """Returns the tokens of all blocks, [rows * block], with their places in the cache.

    Args:
      last: int32 [rows], the first token of each block.
      slots: int32 [rows].
      begin: int32 [rows], the position of the block's first token.
      count: int32 [rows], tokens of the block that have a page; the others are padding.
      page_table: int32 [slots + 1, pages_per_seq]; the last row belongs to padding.
    """
    offsets = jnp.arange(draft.block)
    shape = (last.shape[0], draft.block)
    used, slot = offsets < count[:, None], jnp.broadcast_to(slots[:, None], shape)
    end = jnp.broadcast_to((begin + count - 1)[:, None], shape)
    step = places_of(
        used.reshape(-1),
        slot.reshape(-1),
        (begin[:, None] + offsets).reshape(-1),
        end.reshape(-1),
        page_table,
        page_size=page_size,
    )
    ids = jnp.where(offsets == 0, last[:, None], draft.mask_token).reshape(-1)
    return StepTokens(ids, (step,))


def block_hidden(
    params: BlockParams,
    draft: BlockDraft,
    embedding: Weight,
    cache: Array,
    tokens: StepTokens,
    *,
    target: Target,
) -> tuple[Array, Array]:
    """Run blocks through the head's layers.

    Args:
      embedding: the target's [vocab, embed].
      tokens: see `block_tokens`. Every query tile is one token at the position of its block's end,
        so it sees the whole block.

    Returns:
      Hidden states after the final norm [tokens, embed], and the head's cache. It now holds the
      blocks' keys and values, until those of the target's tokens overwrite them.
    """
    body = draft.body
    layers = layer_views(params.layers)
    x = take_rows(embedding, tokens.ids, params.final_norm.dtype)
    normed = rms_norm(x, layers[0].attention_norm, body.norm_eps)
    norms = [*(Norm(layer.attention_norm) for layer in layers[1:]), Norm(params.final_norm)]
    tables = step_tables(body, tokens.positions)
    kv: Caches = (cache,)
    for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        own, place = tables[table_of_layer(body, index)], CachePlace(0, index)
        with jax.named_scope(f"draft_{index}"):
            x, normed, kv = decoder_layer(
                *(layer, norm, place, x, normed, kv, own, tokens, body),
                tile_size=1,
                target=target,
            )
    return plain(normed), only_cache(kv)


def propose(params: BlockParams, scores: Array, last: Array, draw: Draw) -> Array:
    """Returns the drafts, int32 [rows, drafts]. They are drawn one at a time: with a Markov head,
    the scores of a draft depend on the draft before.

    Args:
      scores: float32 [rows, drafts, vocab], from the target's output matrix.
      last: int32 [rows], the first token of each block.
      draw: draws a token for each row.
    """
    drafts: list[Array] = []
    for number in range(scores.shape[1]):
        last = draw(scores[:, number] + markov_scores(params, last), number)
        drafts.append(last)
    return jnp.stack(drafts, axis=1)


def markov_scores(params: BlockParams, previous: Array) -> Array | float:
    """Returns the Markov head's addend to the scores, float32 [rows, vocab]; 0 without a head.

    Args:
      previous: int32 [rows], the token before each draft.
    """
    if params.markov_in is None or params.markov_out is None:
        return 0.0
    rows = params.markov_in[previous]
    return jnp.einsum("nr,vr->nv", rows, params.markov_out, preferred_element_type=jnp.float32)


def acceptance(params: BlockParams, hidden: Array, previous: Array) -> Array:
    """Returns the probability that a draft is accepted if all drafts before it are, float32 [rows].

    Args:
      hidden: [rows, embed], the states after the final norm that the drafts were drawn from.
      previous: int32 [rows], the tokens before the drafts.
    """
    assert params.confidence is not None and params.confidence_bias is not None
    if params.confidence.shape[1] > hidden.shape[1]:
        assert params.markov_in is not None
        hidden = jnp.concatenate([hidden, params.markov_in[previous]], axis=-1)
    score = jnp.einsum("nd,od->n", hidden, params.confidence, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(score + params.confidence_bias.astype(jnp.float32))
