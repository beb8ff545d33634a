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
from jaxserve.models.drafts import block
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.draw import draw
from jaxserve.models.drafts.spec import BlockDraft
from jaxserve.models.layer import Caches, StepTokens, paged
from jaxserve_kernels.kv_format import page_size
from jaxserve_kernels.sampler import RowAdjustments, RowSampling, SlotTables
from jaxserve_kernels.target import Target


class WithHead(NamedTuple):
    """The weights that steps read if a head drafts."""

    model: decoder.Params
    head: BlockParams


type StepParams = decoder.Params | WithHead


def model_of(params: StepParams) -> decoder.Params:
    """Returns the weights of the target model."""
    return params.model if isinstance(params, WithHead) else params


def taps_of(draft: BlockDraft | None) -> tuple[int, ...]:
    """Returns the layers of the target whose states a step keeps for the head."""
    return () if draft is None else draft.taps


def remember(
    params: StepParams,
    draft: BlockDraft | None,
    kv: Caches,
    tapped: Sequence[Array],
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    target: Target,
) -> Caches:
    """Returns the caches with what the head will see of a step's tokens."""
    if draft is None:
        return kv
    assert isinstance(params, WithHead)
    first = first_layer(spec)
    return block.write_context(params.head, draft, kv, tapped, tokens, first=first, target=target)


def first_layer(spec: ModelSpec) -> int:
    """Returns where the head's layers begin in the first cache: behind those of the target."""
    return len(spec.cache_groups[0].layers)


class Ends(NamedTuple):
    """Where the rows of a verify step end."""

    slots: Array  # int32 [rows]
    last: Array  # int32 [rows]: the last accepted token, which no step has computed
    position: Array  # int32 [rows]: its position
    held: Array  # int32 [rows]: positions for which the slot has pages; 0 for rows of padding


def draft_ahead(
    params: WithHead,
    draft: BlockDraft,
    kv: Caches,
    page_table: Array,
    ends: Ends,
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
      rows, adjustments: of one position of each row; that position is not used.
      most: drafts for each row.
      vocab: only token ids below it are drawn.

    Returns:
      The drafts, int32 [rows, at most `most`], how many of them each row has, int32 [rows], and kv.
      Blocks end where the pages do.
    """
    size, skipped = page_size(paged(kv)[0]), 0 if draft.predicts_next else 1
    most = min(most, draft.num_drafts)
    count = jnp.clip(ends.held - ends.position, 0, draft.block)
    tokens = block.block_tokens(
        draft, ends.last, ends.slots, ends.position, count, page_table, page_size=size
    )
    hidden, kv = block.block_hidden(
        params.head,
        draft,
        params.model.embedding,
        kv,
        tokens,
        first=first_layer(spec),
        target=target,
    )
    hidden = hidden.reshape(-1, draft.block, hidden.shape[-1])[:, skipped : skipped + most]
    scores = decoder.logits(params.model, hidden.reshape(-1, hidden.shape[-1]), target=target)

    def choose(scores: Array, number: int) -> Array:
        here = rows._replace(position=ends.position + 1 + number, active=count > 0)
        return draw(scores, here, adjustments, tables, vocab=vocab, target=target)

    scores = scores.reshape(*hidden.shape[:2], -1)
    drafts = block.propose(params.head, scores, ends.last, choose)
    return drafts, jnp.clip(count - skipped, 0, most), kv
