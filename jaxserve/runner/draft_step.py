"""Runs a draft head, or a draft model, inside the steps of its target model.

Every step writes draft cache entries for its tokens, see `remember`. A verify step also ends with a
pass of the head, see `draft_ahead`. So the next drafts are on the device before the host knows how
many of the last ones were accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts import block, eagle3, mtp
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.draw import draw
from jaxserve.models.drafts.eagle3 import Eagle3Params
from jaxserve.models.drafts.mtp import MtpParams
from jaxserve.models.drafts.places import Ends
from jaxserve.models.drafts.spec import (
    BlockDraft,
    DraftSpec,
    Eagle3Draft,
    EntryDraft,
    ModelDraft,
    MtpDraft,
)
from jaxserve.models.layer import StepTokens
from jaxserve.runner import draft_cache, entry_step, model_drafts
from jaxserve.runner.entry_step import EntryHead
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.sampler import RowAdjustments, RowSampling, SlotTables
from jaxserve_kernels.target import Target

type HeadParams = BlockParams | Eagle3Params | MtpParams | decoder.Params
"""The weights of a head or of a draft model."""


class WithHead(NamedTuple):
    """The weights that steps read if a head drafts."""

    model: decoder.Params
    head: HeadParams


type StepParams = decoder.Params | WithHead


def model_of(params: StepParams) -> decoder.Params:
    """Returns the weights of the target model."""
    return params.model if isinstance(params, WithHead) else params


def taps_of(draft: DraftSpec | None) -> tuple[int, ...]:
    """Returns the target's layers whose hidden states the head reads."""
    return () if draft is None else draft.taps


def finish_rows(
    params: decoder.Params,
    draft: DraftSpec | None,
    pre_mlp: decoder.PreMLP,
    rows: Array,
    tapped: Sequence[Array],
    spec: ModelSpec,
    *,
    active: Array | None,
    target: Target,
) -> tuple[Array, Sequence[Array]]:
    """Applies the final norm after a mixed step.

    Args:
      rows: int32 [rows], index of each row's last token.
      tapped: hidden states [tokens, embed] after each of `taps_of`.
      active: see `StepTokens`.

    Returns:
      The final hidden states [rows, embed] of the tokens at `rows`, and the head's input: `tapped`,
      or for MTP the final hidden states of all tokens.
    """
    if not isinstance(draft, MtpDraft):
        return decoder.finish(params, pre_mlp.of(rows), spec, target=target), tapped
    every = decoder.finish(params, pre_mlp, spec, active=active, target=target)
    return every[rows], (every,)


def remember(
    params: StepParams,
    draft: DraftSpec | None,
    cache: Array | None,
    tapped: Sequence[Array],
    tokens: StepTokens,
    kept: Array | None,
    sequences: Array,
    *,
    tile_size: int | None,
    target: Target,
) -> tuple[Array | None, Array | None]:
    """Writes draft cache entries for a step's tokens.

    Args:
      cache: the draft cache, see `draft_cache`; None without a head.
      tapped: the head's input, see `finish_rows`.
      kept: see `DeviceState.draft_states`.
      sequences: see `sequence_state`.
      tile_size: the step's; None for a decode step, with one token per sequence.

    Returns:
      The draft cache; and for `keep` the tokens' states as the head reads them, [tokens, embed],
      with EAGLE-3 and MTP only.
    """
    if draft is None:
        return None, None
    assert isinstance(params, WithHead) and cache is not None
    head, states, pages = params.head, None, draft_cache.as_pages(cache)
    tokens = StepTokens(tokens.ids, (draft_cache.places(tokens.places[0], cache),))
    if isinstance(draft, BlockDraft):
        assert isinstance(head, BlockParams)
        pages = block.write_context(head, draft, pages, tapped, tokens, target=target)
    elif isinstance(draft, ModelDraft):
        assert isinstance(head, decoder.Params)
        own = (head, draft, pages, tokens)
        pages = model_drafts.write_tokens(*own, tile_size=tile_size, target=target)
    else:
        assert kept is not None
        is_mtp = isinstance(draft, MtpDraft)
        (states,) = tapped if is_mtp else [_states(head, tapped, target=target)]
        entries = _entry_head(params, draft, target=target)
        pages = entry_step.write_entries(entries, pages, tokens, states, kept, sequences)
    return pages.reshape(cache.shape), states


def _states(head: HeadParams, tapped: Sequence[Array], *, target: Target) -> Array:
    assert isinstance(head, Eagle3Params)
    return eagle3.states(head, tapped, target=target)


def _entry_head(params: WithHead, draft: EntryDraft, *, target: Target) -> EntryHead:
    head, model = params.head, params.model
    own = (head, draft, model.embedding)
    if isinstance(draft, MtpDraft):
        assert isinstance(head, MtpParams)
        return EntryHead(
            functools.partial(mtp.store, *own, target=target),
            functools.partial(mtp.extend, *own, tile_size=1, target=target),
            functools.partial(decoder.logits, model, target=target),
        )
    assert isinstance(head, Eagle3Params)
    return EntryHead(
        functools.partial(eagle3.store, *own, target=target),
        functools.partial(eagle3.extend, *own, tile_size=1, target=target),
        functools.partial(eagle3.scores, head, draft, target=target),
    )


def keep(
    draft: DraftSpec | None,
    kept: Array | None,
    sequences: Array,
    states: Array | None,
    last: Array,
    slots: Array,
    lengths: Array,
) -> tuple[Array | None, Array]:
    """Returns `DeviceState.draft_states` and the sequence state after a step, see
    `entry_step.keep`. `states` comes from `remember`."""
    if not isinstance(draft, Eagle3Draft | MtpDraft):
        return None, sequences
    assert kept is not None and states is not None
    return entry_step.keep(kept, sequences, states, last, slots, lengths)


def draft_ahead(
    params: WithHead,
    draft: DraftSpec,
    cache: Array,
    page_table: Array,
    ends: Ends,
    states: Array | None,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    spec: ModelSpec,
    *,
    most: int,
    vocab: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Draft the tokens that follow each row's last token.

    A draft is drawn with the sampling noise of its position, see `drafts.draw`.

    Args:
      cache: see `draft_cache`.
      page_table: int32 [slots + 1, pages_per_seq], of the model's first cache group.
      states: EAGLE-3 and MTP only, [rows, embed]: states of the tokens before the last ones.
      rows, adjustments: one entry per row; `rows.position` is ignored.
      most: the most drafts per row.
      vocab: only token ids below it are drawn.

    Returns:
      The drafts, int32 [rows, at most `most`]; the number of valid drafts, int32 [rows]; and the
      cache. A row gets no drafts beyond its pages.
    """

    def choose(scores: Array, number: int) -> Array:
        here = rows._replace(position=ends.position + 1 + number, active=ends.held > ends.position)
        return draw(scores, here, adjustments, tables, vocab=vocab, target=target)

    most, table = min(most, draft.num_drafts), draft_cache.page_table(page_table, cache)
    pages = draft_cache.as_pages(cache)
    if isinstance(draft, Eagle3Draft | MtpDraft):
        assert states is not None
        own = (_entry_head(params, draft, target=target), pages, table, ends, states, choose)
        drafts, count, pages = entry_step.draft_tokens(*own, most=most)
    elif isinstance(draft, ModelDraft):
        assert isinstance(params.head, decoder.Params)
        own = (params.head, draft, pages, table, ends, choose)
        drafts, count, pages = model_drafts.draft_tokens(
            *own, vocab=spec.vocab_size, most=most, target=target
        )
    else:
        own = (params, draft, pages, table, ends, choose)
        drafts, count, pages = _draft_block(*own, most=most, target=target)
    return drafts, count, pages.reshape(cache.shape)


def _draft_block(
    params: WithHead,
    draft: BlockDraft,
    cache: Array,
    page_table: Array,
    ends: Ends,
    choose: Callable[[Array, int], Array],
    *,
    most: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Draft a block after each row's last token. Returns the same as `draft_ahead`."""
    assert isinstance(params.head, BlockParams)
    size, skipped = page_size(cache), 0 if draft.predicts_next else 1
    count = jnp.clip(ends.held - ends.position, 0, draft.block)
    tokens = block.block_tokens(
        draft, ends.last, ends.slots, ends.position, count, page_table, page_size=size
    )
    own = (params.head, draft, params.model.embedding, cache, tokens)
    hidden, cache = block.block_hidden(*own, target=target)
    hidden = hidden.reshape(-1, draft.block, hidden.shape[-1])[:, skipped : skipped + most]
    scores = decoder.logits(params.model, hidden.reshape(-1, hidden.shape[-1]), target=target)
    scores = scores.reshape(*hidden.shape[:2], -1)
    drafts = block.propose(params.head, scores, ends.last, choose)
    return drafts, jnp.clip(count - skipped, 0, most), cache
