"""One step on the device: state changes, forward pass, sampling. A pure function of arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.api import MAX_LOGPROBS
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts.spec import DraftSpec, MtpDraft
from jaxserve.models.layer import Caches, StepTokens, paged
from jaxserve.runner import sequence_state
from jaxserve.runner.batch import (
    DECODE_TOKEN,
    ROW_LOGPROBS,
    ROW_MASKED,
    ROW_SAMPLES,
    Bucket,
    StepInputs,
)
from jaxserve.runner.draft_step import StepParams, finish_rows, keep, model_of, remember, taps_of
from jaxserve_kernels.kv_format import AttentionStep, page_size
from jaxserve_kernels.recurrent_state import Kept, RecurrentStep
from jaxserve_kernels.sampler import (
    MASKED,
    Logprobs,
    RowAdjustments,
    RowSampling,
    SlotTables,
    sample,
)
from jaxserve_kernels.target import Target


class DeviceState(NamedTuple):
    """The arrays that stay on the device between steps; donated to each step.

    Results are part of the state instead of a separate output. XLA reuses an output's memory for
    intermediates while it is free, and a separate output has another address in each step. Most
    nodes of the step's CUDA graph would then have to be updated before its launch.
    """

    kv: Caches
    """The cache of each cache group, then the state of recurrent layers, if any."""
    sequences: Array  # int32, see sequence_state
    tables: SlotTables  # see slot_tables
    pre_mlp: decoder.PreMLP
    """Pre-MLP hidden states of the last mixed step's last layer: [tokens of the largest mixed step,
    ...]."""
    results: Array
    """The last step's results: int32 [rows of the largest step + 1, RESULT_COLUMNS], floats as bits

    No step writes the last row. If a step overwrote the whole array, XLA would use it as scratch
    memory first.
    """
    draft_kv: Array | None = None
    """The draft cache, see `draft_cache`; None without a head or draft model."""
    draft_states: Array | None = None
    """EAGLE-3 and MTP only, [slots + 1, embed]: the hidden state of each sequence's newest computed
    token, see `sequence_state.HEAD_STATE`."""


def unaliased[Inputs](inputs: Inputs, zero: Array) -> Inputs:
    """Returns the parts of a packed step as arrays of their own, so that our kernels never read the
    packed argument.

    The argument has another address in each step. Before each launch XLA changes the nodes of the
    graph that read it. For a node of ours it runs the launch again, and all layers of a decode step
    are one node. XLA would pass a plain slice of the argument. But it does not know that a packed
    step's last number, `zero`, is 0, so it adds that: in its own kernels that read the parts, or in
    one kernel for all parts of one size.
    """
    return jax.tree.map(lambda part: part + zero, inputs)


def run_step(
    params: StepParams,
    state: DeviceState,
    packed: Array,
    *,
    spec: ModelSpec,
    draft: DraftSpec | None = None,
    bucket: Bucket,
    sampled_vocab: int,
    target: Target,
) -> DeviceState:
    """Computes a packed plan.

    Args:
      params: the weights; `WithHead` if there is a `draft`.
      packed: int32 [bucket.packed_size].
      sampled_vocab: only token ids below it are sampled; further rows of the output matrix are
        padding.

    Returns:
      The new state, including the results.
    """
    model, taps = model_of(params), taps_of(draft)
    inputs = unaliased(bucket.unpack(packed), packed[-1])
    sequences = sequence_state.apply(state.sequences, inputs.addresses, inputs.values)
    tokens = locate(inputs, sequences, state.kv, spec)
    if spec.state is not None:
        padding = sequences.shape[0] - 1
        prompts = None if bucket.kind == "decode" else sequences[:, sequence_state.PROMPT]
        recurrent = _rows(inputs, padding, prompts, spec.state.delta_net.block)
        tokens = tokens._replace(recurrent=recurrent)
    kept = state.pre_mlp
    if bucket.kind == "mixed":
        pre_mlp, kv, tapped = decoder.tapped_forward(
            model, state.kv, tokens, spec, tile_size=bucket.tile_size, target=target, taps=taps
        )
        own = (model, draft, pre_mlp, inputs.row_last, tapped, spec)
        hidden, tapped = finish_rows(*own, active=tokens.active, target=target)
        kept = jax.tree.map(overwritten, kept, pre_mlp)
    else:  # each token is the last of its row
        hidden, kv, tapped = decoder.tapped_decode(
            model, state.kv, tokens, spec, target=target, taps=taps
        )
        tapped = (hidden,) if isinstance(draft, MtpDraft) else tapped
    draft_kv, states = remember(
        *(params, draft, state.draft_kv, tapped, tokens, state.draft_states, sequences),
        tile_size=None if bucket.kind == "decode" else bucket.tile_size,
        target=target,
    )
    scores = decoder.logits(model, hidden, target=target)
    rows = row_sampling(inputs, sequences)
    wanted = (inputs.row_flags & ROW_LOGPROBS) != 0
    chosen, logprobs, tables = sample(
        scores,
        rows,
        row_adjustments(inputs, sequences),
        state.tables,
        wanted,
        vocab=sampled_vocab,
        alternatives=MAX_LOGPROBS,
        target=target,
    )

    padding_slot = sequences.shape[0] - 1
    slots = jnp.where(rows.active, inputs.row_slots, padding_slot)
    sequences = sequences.at[slots, sequence_state.LAST_TOKEN].set(chosen)
    results = overwritten(state.results, result_rows(chosen, logprobs))
    lengths = inputs.token_positions[inputs.row_last] + 1
    own = (draft, state.draft_states, sequences, states)
    draft_states, sequences = keep(*own, inputs.row_last, inputs.row_slots, lengths)
    return DeviceState(kv, sequences, tables, kept, results, draft_kv, draft_states)


def overwritten(old: Array, new: Array) -> Array:
    """Returns `old` with its first rows replaced."""
    return lax.dynamic_update_slice(old, new, (0,) * old.ndim)


def locate(inputs: StepInputs, sequences: Array, kv: Caches, spec: ModelSpec) -> StepTokens:
    """Returns the token ids and, for each cache group, the page and offset of each token's key and
    value; and which tokens are padding, if the model has experts."""
    caches = paged(kv)
    groups, page_tokens = len(caches), page_size(caches[0])
    last = sequences[inputs.token_slots, sequence_state.LAST_TOKEN]
    slots, positions = inputs.token_slots, inputs.token_positions
    pages = sequence_state.pages_at(sequences, groups, slots, positions // page_tokens)
    places = tuple(
        AttentionStep(
            slots=slots,
            positions=positions,
            pages=own,
            offsets=positions % page_tokens,
            tiles=inputs.tiles,
            page_table=table,
        )
        for own, table in zip(pages, sequence_state.page_tables(sequences, groups), strict=True)
    )
    ids = jnp.where(inputs.token_ids == DECODE_TOKEN, last, inputs.token_ids)
    active = (slots != sequences.shape[0] - 1).astype(jnp.int32) if spec.experts else None
    return StepTokens(ids, places, active=active)


def _rows(
    inputs: StepInputs, padding_slot: int, prompts: Array | None, block: int
) -> RecurrentStep:
    """Returns the tokens' places in the state of recurrent layers.

    Args:
      prompts: int32 [slots + 1], length of each slot's prompt in tokens; None: each token is a row.
      block: see `DeltaNetSpec.block`.
    """
    slots, positions, rows = inputs.token_slots, inputs.token_positions, inputs.row_slots
    if prompts is None:
        return RecurrentStep.of_decode(slots, positions, padding_slot)
    kept = Kept(inputs.row_kept, inputs.row_kept_slots)
    own = (slots, positions, rows, inputs.row_last, prompts[rows], block)
    return RecurrentStep.of_rows(*own, kept)


def row_sampling(inputs: StepInputs, sequences: Array) -> RowSampling:
    """Returns the sampling parameters of each row, read from its slot."""
    slots = inputs.row_slots

    def floats(column: int) -> Array:
        return sequence_state.float_column(sequences, slots, column)

    return RowSampling(
        active=(inputs.row_flags & ROW_SAMPLES) != 0,
        temperature=floats(sequence_state.TEMPERATURE),
        top_k=sequences[slots, sequence_state.TOP_K],
        top_p=floats(sequence_state.TOP_P),
        min_p=floats(sequence_state.MIN_P),
        seed=sequences[slots, sequence_state.SEED],
        position=inputs.token_positions[inputs.row_last] + 1,
    )


def row_adjustments(inputs: StepInputs, sequences: Array) -> RowAdjustments:
    """Returns the score adjustments of each row: penalties, biases and masks of its slot."""
    slots = inputs.row_slots
    features = sequences[slots, sequence_state.FEATURES]
    masked = (inputs.row_flags & ROW_MASKED) != 0
    return RowAdjustments(
        features=features | jnp.where(masked, MASKED, 0),
        slots=slots,
        presence=sequence_state.float_column(sequences, slots, sequence_state.PRESENCE),
        frequency=sequence_state.float_column(sequences, slots, sequence_state.FREQUENCY),
        repetition=sequence_state.float_column(sequences, slots, sequence_state.REPETITION),
    )


def result_rows(chosen: Array, logprobs: Logprobs) -> Array:
    """Returns int32 [rows, RESULT_COLUMNS], see `DeviceState.results`."""

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    columns = [
        chosen[:, None],
        bits(logprobs.sampled)[:, None],
        logprobs.top_ids,
        bits(logprobs.top),
    ]
    return jnp.concatenate(columns, axis=1)
