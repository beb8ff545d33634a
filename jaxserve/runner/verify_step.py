"""A verify step on the device: places drafts, computes and samples, accepts, drafts again."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.api import MAX_LOGPROBS
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts.places import Ends
from jaxserve.models.drafts.spec import DraftSpec, MtpDraft
from jaxserve.models.layer import paged
from jaxserve.runner import recurrent_drafts, sequence_state
from jaxserve.runner.batch import DECODE_TOKEN, ROW_LOGPROBS, ROW_MASKED, ROW_SAMPLES, StepInputs
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
from jaxserve_kernels.kv_format import format_of, page_size
from jaxserve_kernels.sampler import Logprobs, RowAdjustments, SlotTables, sample
from jaxserve_kernels.sampler.adjust import count
from jaxserve_kernels.target import Target


class Runs(NamedTuple):
    """The consecutive positions that each row computes."""

    slots: Array  # int32 [rows]
    begin: Array  # int32 [rows]: the first position
    length: Array  # int32 [rows]: number of positions; 0 for padding
    drafts: Array  # int32 [rows, positions - 1]: drafts after the first position, or NO_TOKEN

    @property
    def used(self) -> Array:
        """Whether a row computes a position: bool [rows, positions]."""
        return jnp.arange(self.drafts.shape[1] + 1) < self.length[:, None]

    def accepted(self, chosen: Array) -> Array:
        """Returns the number of accepted positions of each row, int32 [rows].

        The first position is always accepted. A further one is accepted if the position before it
        is accepted and chose its draft.

        Args:
          chosen: int32 [rows, positions], the sampled tokens.
        """
        hits = (chosen[:, :-1] == self.drafts) & self.used[:, 1:]
        found = 1 + jnp.cumprod(hits.astype(jnp.int32), axis=1).sum(axis=1)
        return jnp.where(self.length > 0, found, 0)


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
    size = page_size(paged(state.kv)[0])
    rewrites = all(format_of(kv).rewrites_pages for kv in paged(state.kv))
    runs = runs_of(asked, verify, bucket.positions, None if rewrites else size)
    inputs = step_inputs(asked, runs, padding_slot=sequences.shape[0] - 1)
    tokens = locate(inputs, sequences, state.kv, spec)
    if spec.state is not None:
        tokens = recurrent_drafts.located(tokens, runs.slots, runs.begin, runs.length)
    pre_mlp, kv, tapped = decoder.tapped_forward(
        model,
        recurrent_drafts.unsettled(state.kv),
        tokens,
        spec,
        tile_size=bucket.positions,
        target=target,
        taps=taps_of(draft),
    )
    hidden = decoder.finish(model, pre_mlp, spec, active=tokens.active, target=target)
    tapped = (hidden,) if isinstance(draft, MtpDraft) else tapped
    draft_kv, states = remember(
        *(params, draft, state.draft_kv, tapped, tokens, state.draft_states, sequences),
        tile_size=bucket.positions,
        target=target,
    )
    scores = decoder.logits(model, hidden, target=target)
    adjustments = row_adjustments(inputs, sequences)
    position_tables = tables_of_positions(state.tables, verify.masks, asked, runs, adjustments)
    sampling = row_sampling(inputs, sequences)
    chosen, logprobs, _ = sample(
        scores,
        sampling,
        adjustments._replace(slots=jnp.arange(bucket.tokens)),
        position_tables,
        (inputs.row_flags & ROW_LOGPROBS) != 0,
        vocab=sampled_vocab,
        alternatives=MAX_LOGPROBS,
        target=target,
    )
    chosen = chosen.reshape(bucket.rows, bucket.positions)
    accepted = runs.accepted(chosen)
    own = (model, kv, tokens, accepted, spec)
    kv = recurrent_drafts.settled(*own, padding_slot=sequences.shape[0] - 1, target=target)
    ends = ends_of(runs, chosen, accepted, asked.row_ends, size)
    sequences = with_last_tokens(sequences, runs.slots, chosen, accepted)
    last = bucket.positions * jnp.arange(bucket.rows) + jnp.maximum(accepted - 1, 0)
    slots = jnp.where(accepted > 0, runs.slots, sequences.shape[0] - 1)
    own = (draft, state.draft_states, sequences, states, last, slots, ends.position)
    draft_states, sequences = keep(*own)
    state = DeviceState(
        kv,
        sequences,
        with_counts(state.tables, chosen, accepted, adjustments),
        state.pre_mlp,
        overwritten(state.results, _results(chosen, logprobs, accepted)),
        draft_kv,
        draft_states,
    )
    lengths = verify.lengths.at[runs.slots].set(runs.begin + accepted)
    verify = verify._replace(lengths=lengths)
    if draft is None:
        return state, verify
    assert isinstance(params, WithHead) and draft_kv is not None
    page_table = sequence_state.page_tables(sequences, len(paged(kv)))[0]
    drafts, count, draft_kv = draft_ahead(
        params,
        draft,
        draft_kv,
        page_table,
        ends,
        None if states is None else states[last],
        _of_rows(sampling, bucket.rows),
        _of_rows(adjustments, bucket.rows),
        state.tables,
        spec,
        most=verify.drafts.shape[1] // 2,
        vocab=sampled_vocab,
        target=target,
    )
    state = state._replace(draft_kv=draft_kv)
    return state, with_own_drafts(verify, runs.slots, drafts, count)


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


def runs_of(asked: VerifyInputs, state: VerifyState, positions: int, page: int | None) -> Runs:
    """Returns the positions that each row computes. Drafts, bounds and the bucket limit them.

    Args:
      positions: positions per row of the bucket.
      page: tokens per page if a row must stay in the page where it begins; otherwise None.
    """
    slots = asked.row_slots
    begin = jnp.where(asked.row_starts < 0, state.lengths[slots], asked.row_starts)
    first, window = state.draft_first[slots], state.drafts.shape[1]
    index = begin[:, None] + 1 + jnp.arange(positions - 1) - first[:, None]
    there = (first[:, None] > 0) & (index >= 0) & (index < window)
    found = jnp.take_along_axis(state.drafts[slots], jnp.clip(index, 0, window - 1), axis=1)
    drafts = jnp.where(there, found, NO_TOKEN)
    known = jnp.cumprod((drafts >= 0).astype(jnp.int32), axis=1).sum(axis=1)
    end = asked.row_ends
    if page is not None:
        end = jnp.minimum(end, (lax.div(begin, page) + 1) * page)
    most = jnp.minimum(asked.row_positions, 1 + known)
    return Runs(slots, begin, jnp.clip(jnp.minimum(most, end - begin), 0, positions), drafts)


def step_inputs(asked: VerifyInputs, runs: Runs, *, padding_slot: int) -> StepInputs:
    """Returns the inputs of a mixed step. Each run is a chunk, and each position is a row that
    samples. Positions that no run uses are padding."""
    used = runs.used
    rows, positions = used.shape
    step = jnp.arange(positions)
    last = jnp.full((rows, 1), DECODE_TOKEN)
    ids = jnp.where(used, jnp.concatenate([last, runs.drafts], axis=1), 0).reshape(-1)
    slots = jnp.where(used, runs.slots[:, None], padding_slot).reshape(-1)
    flags = asked.row_flags[:, None] | jnp.where(asked.masked != 0, ROW_MASKED, 0)
    nothing = jnp.zeros(0, jnp.int32)
    return StepInputs(
        addresses=asked.addresses,
        values=asked.values,
        token_ids=ids,
        token_slots=slots,
        token_positions=jnp.where(used, runs.begin[:, None] + step, 0).reshape(-1),
        row_slots=slots,
        row_last=jnp.arange(rows * positions),
        row_flags=jnp.where(used, flags | ROW_SAMPLES, 0).reshape(-1),
        row_kept=nothing,
        row_kept_slots=nothing,
        **_tiles(runs, positions, padding_slot),
        decode_first=nothing,
        decode_length=nothing,
        decode_slots=nothing,
        decode_positions=nothing,
    )


def _tiles(runs: Runs, positions: int, padding_slot: int) -> dict[str, Array]:
    """Returns one query tile per run. Padding tiles come last, as attention expects."""
    rows = runs.slots.shape[0]
    real = runs.length > 0
    place = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, rows)

    def moved(values: Array, padding: int) -> Array:
        return jnp.full(rows, padding, jnp.int32).at[place].set(values, mode="drop")

    return {
        "tile_first": moved(positions * jnp.arange(rows), 0),
        "tile_length": moved(runs.length, 0),
        "tile_slots": moved(runs.slots, padding_slot),
        "tile_positions": moved(runs.begin, 0),
    }


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
