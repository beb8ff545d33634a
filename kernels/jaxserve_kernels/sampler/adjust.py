"""Penalties, biases and masks that requests apply to the model's scores, in plain JAX.

A row without adjustments costs nothing: tables are read only for rows with the feature set.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

PENALISED, BIASED, MASKED = 1, 2, 4
"""Features of a row, as bits: it uses its slot's counts, biases or mask."""

MAX_BIASES = 1024
"""Entries in a slot's list of biases."""

SUPPRESSED = -1e30
"""The bias of a token that may be chosen only if no other can. Unlike -inf, it leaves a choice if
all other tokens are masked, and arithmetic does not turn it into NaN."""

IN_PROMPT = -(2**15)
"""Bit of a count: the token occurs in the prompt."""
MAX_COUNT = 2**15 - 1
"""Counts of output tokens saturate at this."""


class RowAdjustments(NamedTuple):
    """Adjustment parameters of each row, all [rows]."""

    features: Array  # int32: a sum of PENALISED, BIASED, MASKED
    slots: Array  # int32: row of the tables
    presence: Array  # float32
    frequency: Array  # float32
    repetition: Array  # float32 > 0


class SlotTables(NamedTuple):
    """Tables with a row per slot, on the device. Rows whose feature is not set are undefined."""

    counts: Array
    """int16 [slots, vocab]: how often the token was sampled, plus IN_PROMPT if the prompt has
    it."""
    biases: Array
    """int32 [slots, 3 * MAX_BIASES]: rising token ids, padded with the largest int32; then the
    biases as float32 bits; then the positions from which on each bias is no longer added."""
    masks: Array
    """int32 [slots, ceil(vocab / 32)]: bit i of word w allows token 32 * w + i."""


def adjust(logits: Array, position: Array, rows: RowAdjustments, tables: SlotTables) -> Array:
    """The adjusted scores from which tokens are chosen, float32 [rows, vocab].

    In the order of transformers and vLLM:

    1. biases are added;
    2. if the token occurs in prompt or output, the repetition penalty divides positive scores and
       multiplies negative ones;
    3. frequency times the count in the output is subtracted, and presence if that count is not 0;
    4. tokens that the mask forbids become -inf.

    Args:
      logits: float32 [rows, vocab].
      position: int32 [rows], position of the token to be chosen.
    """

    def has(feature: int) -> Array:
        return (rows.features & feature) != 0

    def changed() -> Array:
        scores = _biased(logits, position, has(BIASED), rows, tables)
        scores = _penalised(scores, has(PENALISED), rows, tables)
        words = tables.masks[rows.slots]
        bits = (words[:, :, None] >> jnp.arange(32)) & 1
        allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(has(MASKED)[:, None] & ~allowed, -jnp.inf, scores)

    return lax.cond(jnp.any(rows.features != 0), changed, lambda: logits)


def count(tokens: Array, counted: Array, rows: RowAdjustments, tables: SlotTables) -> SlotTables:
    """Counts the chosen tokens, int32 [rows], in the tables: for rows in `counted`, bool [rows],
    that have penalties."""
    counts = tables.counts
    old = counts[rows.slots, tokens]
    new = jnp.where((old & MAX_COUNT) < MAX_COUNT, old + jnp.int16(1), old)
    counted &= (rows.features & PENALISED) != 0
    slots = jnp.where(counted, rows.slots, counts.shape[0])
    return tables._replace(counts=counts.at[slots, tokens].set(new, mode="drop"))


def _biased(
    logits: Array, position: Array, biased: Array, rows: RowAdjustments, tables: SlotTables
) -> Array:
    ids, bits, until = jnp.split(tables.biases[rows.slots], 3, axis=1)
    applies = biased[:, None] & (position[:, None] < until)
    values = jnp.where(applies, lax.bitcast_convert_type(bits, jnp.float32), 0.0)
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, ids].add(values, mode="drop")


def _penalised(scores: Array, penalised: Array, rows: RowAdjustments, tables: SlotTables) -> Array:
    counts = tables.counts[rows.slots, : scores.shape[1]]
    output = (counts & MAX_COUNT).astype(jnp.float32)
    factor = rows.repetition[:, None]
    repeated = jnp.where(scores > 0, scores / factor, scores * factor)
    lower = jnp.where(counts != 0, repeated, scores)
    lower = lower - rows.frequency[:, None] * output
    lower = lower - jnp.where(output > 0, rows.presence[:, None], 0.0)
    # Finite for any penalty, and above masked tokens.
    lower = jnp.clip(lower, SUPPRESSED, -SUPPRESSED)
    return jnp.where(penalised[:, None] & (scores > -jnp.inf), lower, scores)
