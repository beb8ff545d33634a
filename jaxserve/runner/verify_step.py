"""A verify step on the device: places drafts, computes and samples, accepts, drafts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve.api import MAX_LOGPROBS
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts.places import Ends
from jaxserve.models.drafts.spec import DraftSpec, MtpDraft
from jaxserve.models.layer import Caches, StepTokens, paged
from jaxserve.runner import recurrent_drafts, sequence_state
from jaxserve.runner.batch import ROW_LOGPROBS, StepInputs
from jaxserve.runner.draft_step import (
    StepParams,
    WithHead,
    draft_ahead,
    keep,
    model_of,
    remember,
    taps_of,
)
from jaxserve.runner.step import (
    DeviceState,
    locate,
    overwritten,
    result_rows,
    row_adjustments,
    row_sampling,
    unaliased,
)
from jaxserve.runner.verify import NO_TOKEN, VerifyBucket, VerifyInputs, VerifyState
from jaxserve.runner.verify_runs import Runs, runs_of, step_inputs
from jaxserve_kernels.kv_format import format_of, page_size
from jaxserve_kernels.sampler import Logprobs, RowAdjustments, RowSampling, SlotTables, sample
from jaxserve_kernels.sampler.adjust import count
from jaxserve_kernels.target import Target


class _Chosen(NamedTuple):
    """What the rows sample, and how."""

    tokens: Array  # int32 [rows, positions]
    logprobs: Logprobs  # of each position
    accepted: Array  # int32 [rows]: number of accepted positions
    sampling: RowSampling  # one entry per position
    adjustments: RowAdjustments  # one entry per position


def run_verify_step(
    params: StepParams,
    state: DeviceState,
    verify: VerifyState,
    packed: Array,
    *,
    spec: ModelSpec,
    draft: DraftSpec | None = None,
    bucket: VerifyBucket,
    sampled_vocab: int,
    target: Target,
) -> tuple[DeviceState, VerifyState]:
    """Computes a packed verify plan. Attention treats each row as a chunk of a prompt. With a
    `draft`, the head then drafts for the next verify step.

    Args:
      params: the weights; `WithHead` if there is a `draft`.
      packed: int32 [bucket.packed_size].
      sampled_vocab: see `run_step`.

    Returns:
      The new states. The results of row r begin at r * bucket.positions.
    """
    model = model_of(params)
    asked = unaliased(bucket.unpack(packed), packed[-1])
    sequences = sequence_state.apply(state.sequences, asked.addresses, asked.values)
    verify = with_drafts(verify, asked)
    size, padding_slot = page_size(paged(state.kv)[0]), sequences.shape[0] - 1
    rewrites = all(format_of(kv).rewrites_pages for kv in paged(state.kv))
    runs = runs_of(asked, verify, bucket.positions, None if rewrites else size)
    inputs = step_inputs(asked, runs, padding_slot=padding_slot)
    tokens = locate(inputs, sequences, state.kv, spec)
    if spec.state is not None:
        tokens = recurrent_drafts.located(tokens, runs.slots, runs.begin, runs.length)
    own = (model, draft, state.kv, tokens, spec)
    hidden, kv, tapped = _forward(*own, tile_size=bucket.positions, target=target)
    draft_kv, states = remember(
        *(params, draft, state.draft_kv, tapped, tokens, state.draft_states, sequences),
        tile_size=bucket.positions,
        target=target,
    )
    scores = decoder.logits(model, hidden, target=target)
    own = (scores, state.tables, verify.masks, asked, runs, inputs, sequences)
    chosen = _choose(*own, vocab=sampled_vocab, target=target)
    own = (model, kv, tokens, chosen.accepted, spec)
    kv = recurrent_drafts.settled(*own, padding_slot=padding_slot, target=target)
    ends = ends_of(runs, chosen.tokens, chosen.accepted, asked.row_ends, size)
    state = state._replace(kv=kv, sequences=sequences, draft_kv=draft_kv)
    state, states = _advance(state, draft, runs, chosen, ends, states)
    verify = verify._replace(lengths=verify.lengths.at[runs.slots].set(ends.position))
    if draft is None:
        return state, verify
    own = (params, draft, state, verify, ends, states, chosen, spec)
    return _draft_next(*own, vocab=sampled_vocab, target=target)


def _forward(
    model: decoder.Params,
    draft: DraftSpec | None,
    kv: Caches,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
) -> tuple[Array, Caches, Sequence[Array]]:
    """Computes the positions.

    Returns:
      The final hidden states [tokens, embed]; the caches, with a recurrent state that is still to
      be settled; and the head's input, see `finish_rows`.
    """
    pre_mlp, kv, tapped = decoder.tapped_forward(
        model,
        recurrent_drafts.unsettled(kv),
        tokens,
        spec,
        tile_size=tile_size,
        target=target,
        taps=taps_of(draft),
    )
    hidden = decoder.finish(model, pre_mlp, spec, active=tokens.active, target=target)
    return hidden, kv, (hidden,) if isinstance(draft, MtpDraft) else tapped


def _choose(
    scores: Array,
    tables: SlotTables,
    masks: Array,
    asked: VerifyInputs,
    runs: Runs,
    inputs: StepInputs,
    sequences: Array,
    *,
    vocab: int,
    target: Target,
) -> _Chosen:
    """Samples a token at each position, and accepts positions.

    Args:
      scores: [tokens, padded vocabulary].
      tables: of the slots.
      masks: see `VerifyState`.
    """
    adjustments = row_adjustments(inputs, sequences)
    position_tables = tables_of_positions(tables, masks, asked, runs, adjustments)
    sampling = row_sampling(inputs, sequences)
    tokens, logprobs, _ = sample(
        scores,
        sampling,
        adjustments._replace(slots=jnp.arange(scores.shape[0])),
        position_tables,
        (inputs.row_flags & ROW_LOGPROBS) != 0,
        vocab=vocab,
        alternatives=MAX_LOGPROBS,
        target=target,
    )
    tokens = tokens.reshape(asked.masked.shape)
    return _Chosen(tokens, logprobs, runs.accepted(tokens), sampling, adjustments)


def _advance(
    state: DeviceState,
    draft: DraftSpec | None,
    runs: Runs,
    chosen: _Chosen,
    ends: Ends,
    states: Array | None,
) -> tuple[DeviceState, Array | None]:
    """Moves the slots to the ends of their rows.

    Args:
      state: with the step's caches.
      states: see `remember`.

    Returns:
      The state with the step's results, and of `states` those of the last accepted positions,
      [rows, embed].
    """
    rows, positions = chosen.tokens.shape
    accepted, padding_slot = chosen.accepted, state.sequences.shape[0] - 1
    sequences = with_last_tokens(state.sequences, runs.slots, chosen.tokens, accepted)
    last = positions * jnp.arange(rows) + jnp.maximum(accepted - 1, 0)
    slots = jnp.where(accepted > 0, runs.slots, padding_slot)
    own = (draft, state.draft_states, sequences, states, last, slots, ends.position)
    draft_states, sequences = keep(*own)
    state = state._replace(
        sequences=sequences,
        tables=with_counts(state.tables, chosen.tokens, accepted, chosen.adjustments),
        results=overwritten(state.results, _results(chosen.tokens, chosen.logprobs, accepted)),
        draft_states=draft_states,
    )
    return state, None if states is None else states[last]


def _draft_next(
    params: StepParams,
    draft: DraftSpec,
    state: DeviceState,
    verify: VerifyState,
    ends: Ends,
    states: Array | None,
    chosen: _Chosen,
    spec: ModelSpec,
    *,
    vocab: int,
    target: Target,
) -> tuple[DeviceState, VerifyState]:
    """Drafts for the next verify step.

    Args:
      states: see `draft_ahead`.
    """
    assert isinstance(params, WithHead) and state.draft_kv is not None
    rows = ends.slots.shape[0]
    drafts, count, draft_kv = draft_ahead(
        params,
        draft,
        state.draft_kv,
        sequence_state.page_tables(state.sequences, len(paged(state.kv)))[0],
        ends,
        states,
        _of_rows(chosen.sampling, rows),
        _of_rows(chosen.adjustments, rows),
        state.tables,
        spec,
        most=verify.drafts.shape[1] // 2,
        vocab=vocab,
        target=target,
    )
    verify = with_own_drafts(verify, ends.slots, drafts, count)
    return state._replace(draft_kv=draft_kv), verify


def with_drafts(state: VerifyState, asked: VerifyInputs) -> VerifyState:
    """Returns the state with the drafts that the host sent with the plan."""
    slots = jnp.where(asked.draft_first > 0, asked.row_slots, state.lengths.shape[0])
    return state._replace(
        draft_first=state.draft_first.at[slots].set(asked.draft_first, mode="drop"),
        drafts=state.drafts.at[slots].set(asked.drafts, mode="drop"),
    )


def with_own_drafts(state: VerifyState, slots: Array, drafts: Array, count: Array) -> VerifyState:
    """Returns the state with a head's drafts for the slots' next rows.

    Args:
      slots: int32 [rows].
      drafts: int32 [rows, drafts].
      count: int32 [rows], the number of valid drafts.
    """
    there = jnp.arange(drafts.shape[1]) < count[:, None]
    window = state.drafts.shape[1]
    padded = jnp.full((slots.shape[0], window), NO_TOKEN)
    padded = padded.at[:, : drafts.shape[1]].set(jnp.where(there, drafts, NO_TOKEN))
    return state._replace(
        draft_first=state.draft_first.at[slots].set(state.lengths[slots] + 1),
        drafts=state.drafts.at[slots].set(padded),
    )


def ends_of(runs: Runs, chosen: Array, accepted: Array, row_ends: Array, page: int) -> Ends:
    """Returns where the rows end.

    Args:
      chosen: int32 [rows, positions], the sampled tokens.
      accepted: int32 [rows], number of accepted positions.
      row_ends: int32 [rows], see `VerifyInputs`. The slot also holds the rest of the last page.
      page: tokens per page.
    """
    held = (row_ends + page - 1) // page * page
    return Ends(
        slots=runs.slots,
        last=last_accepted(chosen, accepted),
        position=runs.begin + accepted,
        held=jnp.where(accepted > 0, held, 0),
    )


def tables_of_positions(
    tables: SlotTables, masks: Array, asked: VerifyInputs, runs: Runs, adjustments: RowAdjustments
) -> SlotTables:
    """Returns tables with one row per position.

    A row equals the slot's tables in plain decoding at that position: the token counts include the
    drafts before it.

    Args:
      masks: int32 [positions of the largest step, words], see `VerifyState`.
      adjustments: one entry per position.
    """
    rows, positions = asked.masked.shape
    own = _of_rows(adjustments, rows)._replace(slots=jnp.arange(rows))
    counted = tables._replace(counts=tables.counts[runs.slots])
    counts = [counted.counts]
    for position in range(1, positions):
        counted = count(runs.drafts[:, position - 1], runs.used[:, position], own, counted)
        counts.append(counted.counts)
    slots = jnp.repeat(runs.slots, positions)
    here = asked.masked.reshape(-1, 1) != 0
    return SlotTables(
        counts=jnp.stack(counts, axis=1).reshape(rows * positions, -1),
        biases=tables.biases[slots],
        masks=jnp.where(here, masks[: rows * positions], tables.masks[slots]),
    )


def with_counts(
    tables: SlotTables, chosen: Array, accepted: Array, adjustments: RowAdjustments
) -> SlotTables:
    """Returns the slots' tables with the accepted tokens counted. Positions are counted one after
    the other, because a row may hold the same token twice."""
    own = _of_rows(adjustments, chosen.shape[0])
    for position in range(chosen.shape[1]):
        tables = count(chosen[:, position], position < accepted, own, tables)
    return tables


def _of_rows[Values: tuple[Array, ...]](values: Values, rows: int) -> Values:
    """Returns the values of each row's first position."""
    return type(values)(*(each.reshape(rows, -1)[:, 0] for each in values))


def with_last_tokens(sequences: Array, slots: Array, chosen: Array, accepted: Array) -> Array:
    """Returns the sequence state with the last accepted token of each slot."""
    last = last_accepted(chosen, accepted)
    slots = jnp.where(accepted > 0, slots, sequences.shape[0] - 1)
    return sequences.at[slots, sequence_state.LAST_TOKEN].set(last)


def last_accepted(chosen: Array, accepted: Array) -> Array:
    """Returns the last accepted token of each row, int32 [rows]. The token of a row that computes
    nothing has no meaning.

    Args:
      chosen: int32 [rows, positions], the sampled tokens.
      accepted: int32 [rows], number of accepted positions.
    """
    return jnp.take_along_axis(chosen, jnp.maximum(accepted - 1, 0)[:, None], axis=1)[:, 0]


def _results(chosen: Array, logprobs: Logprobs, accepted: Array) -> Array:
    kept = jnp.arange(chosen.shape[1]) < accepted[:, None]
    return result_rows(jnp.where(kept, chosen, NO_TOKEN).reshape(-1), logprobs)
