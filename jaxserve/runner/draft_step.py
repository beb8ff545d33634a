"""What a draft head adds to the steps of its target model.

Every step stores what the head will see of the tokens that it computes. A verify step ends with a
pass of the head: its drafts lie on the device before the host knows where the next row begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts import block, eagle3
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.draw import draw
from jaxserve.models.drafts.eagle3 import Eagle3Params
from jaxserve.models.drafts.places import Ends
from jaxserve.models.drafts.spec import BlockDraft, DraftSpec, Eagle3Draft
from jaxserve.models.layer import Caches, StepTokens, paged
from jaxserve.runner import eagle3_step
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.sampler import RowAdjustments, RowSampling, SlotTables
from jaxserve_kernels.target import Target

type HeadParams = BlockParams | Eagle3Params
"""The weights of a head."""


class WithHead(NamedTuple):
    """The weights that steps read if a head drafts."""

    model: decoder.Params
    head: HeadParams


type StepParams = decoder.Params | WithHead


def model_of(params: StepParams) -> decoder.Params:
    """Returns the weights of the target model."""
    return params.model if isinstance(params, WithHead) else params


def taps_of(draft: DraftSpec | None) -> tuple[int, ...]:
    """Returns the layers of the target whose states a step keeps for the head."""
    return () if draft is None else draft.taps


def remember(
    params: StepParams,
    draft: DraftSpec | None,
    kv: Caches,
    tapped: Sequence[Array],
    tokens: StepTokens,
    kept: Array | None,
    sequences: Array,
    spec: ModelSpec,
    *,
    target: Target,
) -> tuple[Caches, Array | None]:
    """Returns the caches with what the head will see of a step's tokens, and its states of them
    [tokens, embed] if those of the newest are kept.

    Args:
      kept: see `DeviceState.head_states`.
      sequences: see `sequence_state`.
    """
    if draft is None:
        return kv, None
    assert isinstance(params, WithHead)
    head, first = params.head, first_layer(spec)
    if isinstance(draft, BlockDraft):
        assert isinstance(head, BlockParams)
        kv = block.write_context(head, draft, kv, tapped, tokens, first=first, target=target)
        return kv, None
    assert isinstance(head, Eagle3Params) and kept is not None
    states = eagle3.states(head, tapped, target=target)
    own = (head, draft, params.model.embedding, kv, tokens, states, kept, sequences)
    return eagle3_step.write_entries(*own, first=first, target=target), states


def keep(
    kept: Array | None,
    sequences: Array,
    states: Array | None,
    last: Array,
    slots: Array,
    lengths: Array,
) -> tuple[Array | None, Array]:
    """Returns the kept states and the sequence state behind a step, see `eagle3_step.keep`."""
    if kept is None or states is None:
        return kept, sequences
    return eagle3_step.keep(kept, sequences, states, last, slots, lengths)


def first_layer(spec: ModelSpec) -> int:
    """Returns where the head's layers begin in the first cache: behind those of the target."""
    return len(spec.cache_groups[0].layers)


def draft_ahead(
    params: WithHead,
    draft: DraftSpec,
    kv: Caches,
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
) -> tuple[Array, Array, Caches]:
    """Draft what follows the rows' last tokens, with the noise of those positions.

    Args:
      page_table: of the first cache, int32 [slots + 1, pages_per_seq].
      states: [rows, embed], the head's of the tokens before the last ones, if it keeps any.
      rows, adjustments: of one position of each row; that position is not used.
      most: drafts for each row.
      vocab: only token ids below it are drawn.

    Returns:
      The drafts, int32 [rows, at most `most`], how many of them each row has, int32 [rows], and kv.
      They end where the pages do.
    """

    def choose(scores: Array, number: int) -> Array:
        here = rows._replace(position=ends.position + 1 + number, active=ends.held > ends.position)
        return draw(scores, here, adjustments, tables, vocab=vocab, target=target)

    most, first = min(most, draft.num_drafts), first_layer(spec)
    if isinstance(draft, Eagle3Draft):
        assert isinstance(params.head, Eagle3Params) and states is not None
        own = (params.head, draft, params.model.embedding, kv, page_table, ends, states, choose)
        return eagle3_step.draft_tokens(*own, first=first, most=most, target=target)
    assert isinstance(params.head, BlockParams)
    size, skipped = page_size(paged(kv)[0]), 0 if draft.predicts_next else 1
    count = jnp.clip(ends.held - ends.position, 0, draft.block)
    tokens = block.block_tokens(
        draft, ends.last, ends.slots, ends.position, count, page_table, page_size=size
    )
    own = (params.head, draft, params.model.embedding, kv, tokens)
    hidden, kv = block.block_hidden(*own, first=first, target=target)
    hidden = hidden.reshape(-1, draft.block, hidden.shape[-1])[:, skipped : skipped + most]
    scores = decoder.logits(params.model, hidden.reshape(-1, hidden.shape[-1]), target=target)
    scores = scores.reshape(*hidden.shape[:2], -1)
    drafts = block.propose(params.head, scores, ends.last, choose)
    return drafts, jnp.clip(count - skipped, 0, most), kv
