"""One step on the device: state changes, forward pass, sampling. A pure function of arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.api import MAX_LOGPROBS
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.runner import sequence_state
from jaxserve.runner.batch import (
    DECODE_TOKEN,
    ROW_LOGPROBS,
    ROW_MASKED,
    ROW_SAMPLES,
    Bucket,
    StepInputs,
)
from jaxserve_kernels.kv_format import KV, AttentionStep, page_size
from jaxserve_kernels.sampler import (
    MASKED,
    Logprobs,
    RowAdjustments,
    RowSampling,
    SlotTables,
    sample,
)


class DeviceState(NamedTuple):
    """What stays on the device between steps; donated to each.

    Results are here, too, and not outputs of their own: XLA keeps intermediates of every layer in
    the memory of an output as long as it is free, and the memory of an output is elsewhere in each
    step, so that most nodes of the step's CUDA graph would have to be changed before its launch.
    """

    kv: KV
    sequences: Array  # int32, see sequence_state
    tables: SlotTables  # see slot_tables
    attended: decoder.Attended
    """The tokens of the last step that could carry prompt chunks, before the end of its last layer;
    [tokens of the largest such step, ...]."""
    results: Array
    """Of the last step: int32 [rows of the largest step + 1, RESULT_COLUMNS], floats as their bits.

    No step writes the last row: an array that a step wrote as a whole would be free until then, and
    XLA would use it as scratch.
    """


def run_step(
    params: decoder.Params,
    state: DeviceState,
    packed: Array,
    *,
    spec: ModelSpec,
    bucket: Bucket,
    sampled_vocab: int,
) -> DeviceState:
    """Compute a packed plan.

    Args:
      packed: int32 [bucket.packed_size].
      sampled_vocab: only token ids below it are sampled; the rest of the output matrix is
        padding that no tokenizer knows.

    Returns:
      The new state, which holds what the host may read.
    """
    inputs = bucket.unpack(packed)
    sequences = sequence_state.apply(state.sequences, inputs.addresses, inputs.values)
    tokens = _locate(inputs, sequences, page_size=page_size(state.kv))
    kept = state.attended
    if bucket.kind == "mixed":
        attended, kv = decoder.forward(params, state.kv, tokens, spec, tile_size=bucket.tile_size)
        hidden = decoder.finish(params, attended.of(inputs.row_last), spec)
        kept = jax.tree.map(_overwritten, kept, attended)
    else:  # each token is the last of its row
        hidden, kv = decoder.decode(params, state.kv, tokens, spec)
    scores = decoder.logits(params, hidden)
    rows = _row_sampling(inputs, sequences)
    wanted = (inputs.row_flags & ROW_LOGPROBS) != 0
    chosen, logprobs, tables = sample(
        scores,
        rows,
        _row_adjustments(inputs, sequences),
        state.tables,
        wanted,
        vocab=sampled_vocab,
        alternatives=MAX_LOGPROBS,
    )

    padding_slot = sequences.shape[0] - 1
    slots = jnp.where(rows.active, inputs.row_slots, padding_slot)
    sequences = sequences.at[slots, sequence_state.LAST_TOKEN].set(chosen)
    results = _overwritten(state.results, _result(chosen, logprobs))
    return DeviceState(kv, sequences, tables, kept, results)


def _overwritten(old: Array, new: Array) -> Array:
    """`old` with its first rows replaced."""
    return lax.dynamic_update_slice(old, new, (0,) * old.ndim)


def _locate(inputs: StepInputs, sequences: Array, *, page_size: int) -> decoder.StepTokens:
    """Ids of the tokens, and the page and offset that each one's key and value go to."""
    last = sequences[inputs.token_slots, sequence_state.LAST_TOKEN]
    table = sequence_state.page_table(sequences)
    positions = inputs.token_positions
    places = AttentionStep(
        slots=inputs.token_slots,
        positions=positions,
        pages=table[inputs.token_slots, positions // page_size],
        offsets=positions % page_size,
        tiles=inputs.tiles,
        page_table=table,
    )
    ids = jnp.where(inputs.token_ids == DECODE_TOKEN, last, inputs.token_ids)
    return decoder.StepTokens(ids, places)


def _row_sampling(inputs: StepInputs, sequences: Array) -> RowSampling:
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


def _row_adjustments(inputs: StepInputs, sequences: Array) -> RowAdjustments:
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


def _result(chosen: Array, logprobs: Logprobs) -> Array:
    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    columns = [
        chosen[:, None],
        bits(logprobs.sampled)[:, None],
        logprobs.top_ids,
        bits(logprobs.top),
    ]
    return jnp.concatenate(columns, axis=1)
