"""What requests change about the scores, against the formulas written with numpy, row by row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve_kernels.sampler import (
    BIASED,
    IN_PROMPT,
    MASKED,
    MAX_BIASES,
    MAX_COUNT,
    PENALISED,
    SUPPRESSED,
    RowAdjustments,
    SlotTables,
)
from jaxserve_kernels.sampler import adjust as module

ROWS, SLOTS, VOCAB, WIDTH = 3, 5, 40, 64
"""The tables are wider than the vocabulary."""

adjust = jax.jit(module.adjust)
count = jax.jit(module.count)


class Inputs(NamedTuple):
    logits: np.ndarray
    position: np.ndarray
    rows: RowAdjustments
    tables: SlotTables


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, 4, (SLOTS, WIDTH)) * (rng.random((SLOTS, WIDTH)) < 0.5)
    counts = np.where(rng.random(counts.shape) < 0.3, counts | IN_PROMPT, counts)
    biases = np.full((SLOTS, 3, MAX_BIASES), 2**31 - 1, np.int32)
    for row in biases:
        entries = rng.integers(0, 12)
        row[0, :entries] = np.sort(rng.integers(0, VOCAB, entries))  # some of them twice
        row[1, :entries] = rng.choice([-100, 0.5, SUPPRESSED], entries).astype("f4").view("i4")
        row[2, :entries] = rng.choice([7, 2**31 - 1], entries)
    column = lambda values: [draw(st.sampled_from(values)) for _ in range(ROWS)]  # noqa: E731
    rows = RowAdjustments(
        features=jnp.asarray(column(range(8)), jnp.int32),
        slots=jnp.asarray(rng.permutation(SLOTS)[:ROWS], jnp.int32),
        presence=jnp.asarray(column([0.0, -2.0, 1.5]), jnp.float32),
        frequency=jnp.asarray(column([0.0, -1.0, 2.0]), jnp.float32),
        repetition=jnp.asarray(column([1.0, 1.25, 0.5, 1e-9, 1e9]), jnp.float32),
    )
    masks = rng.integers(-(2**31), 2**31, (SLOTS, WIDTH // 32))
    tables = SlotTables(
        jnp.asarray(counts, jnp.int16),
        jnp.asarray(biases.reshape(SLOTS, -1)),
        jnp.asarray(masks, jnp.int32),
    )
    logits = rng.normal(0, 4, (ROWS, VOCAB)).astype(np.float32)
    return Inputs(logits, np.asarray(column([6, 7, 100]), np.int32), rows, tables)


def expected_row(given: Inputs, row: int) -> np.ndarray:
    """In float64, token by token."""
    features, slot, presence, frequency, repetition = (x[row].item() for x in given.rows)
    counts, biases, masks = (np.asarray(table[slot]) for table in given.tables)
    scores = given.logits[row].astype(np.float64)
    if features & BIASED:
        for token, bits, until in biases.reshape(3, -1).T:
            if token < VOCAB and given.position[row] < until:
                scores[token] += bits.view(np.float32)
    for token in range(VOCAB):
        if features & PENALISED:
            output, seen = int(counts[token]) & MAX_COUNT, counts[token] != 0
            if seen:
                scores[token] *= 1 / repetition if scores[token] > 0 else repetition
            scores[token] -= frequency * output + presence * (output > 0)
        if features & MASKED and not (int(masks[token // 32]) >> (token % 32)) & 1:
            scores[token] = -np.inf
    return scores


@settings(max_examples=80)
@given(given_inputs=inputs())
def test_scores_are_adjusted_by_the_formulas(given_inputs: Inputs) -> None:
    got = np.asarray(adjust(*given_inputs))
    for row in range(ROWS):
        expected = expected_row(given_inputs, row)
        np.testing.assert_array_equal(np.isneginf(got[row]), np.isneginf(expected))
        finite = np.abs(expected) < 1e25  # beyond it nothing is chosen while anything else is left
        np.testing.assert_allclose(got[row][finite], expected[finite], rtol=1e-5, atol=1e-5)
        assert (np.sign(got[row][~finite]) == np.sign(expected[~finite])).all()


def test_a_row_without_features_is_untouched_whatever_its_slot_holds() -> None:
    logits = np.linspace(-3, 3, ROWS * VOCAB, dtype=np.float32).reshape(ROWS, VOCAB)
    broken = jnp.full(ROWS, jnp.nan)
    rows = RowAdjustments(
        *(jnp.asarray(x, jnp.int32) for x in ([0, 7, 0], [0, 1, 2])), *[broken] * 3
    )
    tables = SlotTables(
        jnp.full((SLOTS, WIDTH), -1, jnp.int16),
        jnp.full((SLOTS, 3 * MAX_BIASES), -1, jnp.int32),
        jnp.zeros((SLOTS, WIDTH // 32), jnp.int32),
    )
    got = np.asarray(adjust(logits, np.zeros(ROWS, np.int32), rows, tables))
    np.testing.assert_array_equal(got[[0, 2]], logits[[0, 2]])
    assert np.isneginf(got[1]).all()


@settings(max_examples=50)
@given(given_inputs=inputs(), data=st.data())
def test_a_sampled_token_is_counted_once_for_rows_with_penalties(
    given_inputs: Inputs, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=ROWS, max_size=ROWS))
    active = data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    rows, tables = given_inputs.rows, given_inputs.tables
    after = count(jnp.asarray(tokens), jnp.asarray(active), rows, tables)
    expected = np.array(tables.counts)
    for row, (token, counted) in enumerate(zip(tokens, active, strict=True)):
        if counted and int(rows.features[row]) & PENALISED:
            expected[int(rows.slots[row]), token] += 1
    np.testing.assert_array_equal(after.counts, expected)


def test_counts_stay_at_the_largest_that_they_can_hold() -> None:
    """With the bit of the prompt beside them."""
    counts = np.zeros((SLOTS, WIDTH), np.int16)
    counts[0, 5], counts[1, 5] = MAX_COUNT, MAX_COUNT | IN_PROMPT
    ones: Any = jnp.ones(2, jnp.int32)
    rows = RowAdjustments(PENALISED * ones, jnp.arange(2), ones, ones, ones)
    empty = jnp.zeros((SLOTS, 1), jnp.int32)
    tables = SlotTables(jnp.asarray(counts), empty, empty)
    after = count(5 * ones, ones > 0, rows, tables)
    np.testing.assert_array_equal(after.counts, counts)
