"""The sampler's Triton kernels against their plain-JAX references, on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.sampler import (
    BIASED,
    IN_PROMPT,
    MASKED,
    MAX_BIASES,
    MAX_COUNT,
    PENALISED,
    SUPPRESSED,
    RowAdjustments,
    RowSampling,
    Sample,
    SlotTables,
    TokenScores,
    sample,
    score,
)
from jaxserve_kernels.target import Implementation, Target

pytestmark = pytest.mark.gpu

VOCAB, PADDED = 151_669, 151_936


KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 1.5, "top_k": 50, "min_p": 0.1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "large_k": {"temperature": 1.0, "top_k": 300, "top_p": 0.8},
    "cold": {"temperature": 0.01, "top_p": 0.5},
    "nucleus": {"temperature": 0.5, "top_p": 0.9},
    "min_p_alone": {"temperature": 1.0, "min_p": 0.02},
    "nucleus_min_p": {"temperature": 0.35, "top_p": 0.95, "min_p": 0.05},
}
"""Logits with a deviation of 3 leave nuclei of 10 to 100 tokens at a temperature of 0.5, a few at
0.35, and thousands at 1."""


def sampler_inputs(rows: int, seed: int) -> tuple[jax.Array, RowSampling, jax.Array]:
    """Rows of every kind in turn, some idle, some with logprobs."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, PADDED)).astype(np.float32)
    logits[:, VOCAB:] = 100.0  # padding must never be chosen
    kinds = [list(KINDS.values())[row % len(KINDS)] for row in range(rows)]

    def column(name: str, default: float, dtype: str) -> jax.Array:
        return jnp.asarray([kind.get(name, default) for kind in kinds], dtype)

    sampling = RowSampling(
        active=jnp.asarray(rng.random(rows) < 0.95),
        temperature=column("temperature", 0.0, "float32"),
        top_k=column("top_k", 0, "int32"),
        top_p=column("top_p", 1.0, "float32"),
        min_p=column("min_p", 0.0, "float32"),
        seed=jnp.asarray(rng.integers(-(2**31), 2**31, rows), jnp.int32),
        position=jnp.asarray(rng.integers(1, 40_000, rows), jnp.int32),
    )
    return jnp.asarray(logits), sampling, jnp.asarray(rng.random(rows) < 0.5)


def sampler_adjustments(rows: int, seed: int) -> tuple[RowAdjustments, SlotTables]:
    """Every combination of features in turn; a third of the rows has none."""
    rng = np.random.default_rng(seed)
    combinations = (0, 0, 0, 0, PENALISED, BIASED, MASKED, 3, 5, 6, 7, 7)
    slots = rows + 3
    counts = rng.integers(0, 5, (slots, PADDED)) * (rng.random((slots, PADDED)) < 0.02)
    counts = counts.astype(np.int16)
    counts[rng.random((slots, PADDED)) < 0.02] |= IN_PROMPT
    counts[:, :8] = MAX_COUNT  # sampled or not, they stay
    masks = rng.integers(-(2**31), 2**31, (slots, PADDED // 32)).astype(np.int32)
    masks[::3, 1:] = 0  # only 32 tokens
    biases = np.full((slots, 3, MAX_BIASES), 2**31 - 1, np.int32)
    for row in biases:
        count = rng.integers(1, 600)
        row[0, :count] = np.sort(rng.integers(0, VOCAB, count))
        values = rng.choice([-100.0, 5.0, SUPPRESSED], count).astype(np.float32)
        row[1, :count] = values.view(np.int32)
        row[2, :count] = rng.choice([10, 20_000, 2**31 - 1], count)
    adjustments = RowAdjustments(
        features=jnp.asarray([combinations[(row + seed) % 12] for row in range(rows)], jnp.int32),
        slots=jnp.asarray(rng.permutation(slots)[:rows], jnp.int32),
        presence=jnp.asarray(rng.uniform(-2, 2, rows), jnp.float32),
        frequency=jnp.asarray(rng.uniform(-2, 2, rows), jnp.float32),
        repetition=jnp.asarray(rng.choice([1.0, 1.3, 0.7, 1e-9], rows), jnp.float32),
    )
    tables = SlotTables(
        jnp.asarray(counts), jnp.asarray(biases.reshape(slots, -1)), jnp.asarray(masks)
    )
    return adjustments, tables


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 12, 200])
def test_the_sampler_chooses_what_its_reference_chooses(rows: int) -> None:
    logits, sampling, wanted = sampler_inputs(rows, seed=rows)
    adjustments, tables = sampler_adjustments(rows, seed=rows)

    def run(implementation: Implementation) -> Sample:
        target = Target.here().replace(implementation=implementation)
        return jax.jit(functools.partial(sample, vocab=VOCAB, alternatives=20, target=target))(
            logits, sampling, adjustments, tables, wanted
        )

    tokens, logprobs, counted = run("triton")
    expected, expected_logprobs, expected_tables = run("reference")
    same = np.asarray(tokens) == np.asarray(expected)
    # A draw may differ where two noisy maxima are within rounding of each other.
    assert same.mean() >= 0.99, np.flatnonzero(~same)
    np.testing.assert_allclose(
        logprobs.sampled[same], expected_logprobs.sampled[same], rtol=1e-4, atol=1e-4
    )
    asked = np.asarray(wanted)
    np.testing.assert_array_equal(logprobs.top_ids[asked], expected_logprobs.top_ids[asked])
    np.testing.assert_allclose(
        logprobs.top[asked], expected_logprobs.top[asked], rtol=1e-4, atol=1e-4
    )
    slots = np.asarray(adjustments.slots)[same]
    np.testing.assert_array_equal(counted.counts[slots], expected_tables.counts[slots])
    others = np.setdiff1d(np.arange(len(tables.counts)), np.asarray(adjustments.slots))
    np.testing.assert_array_equal(counted.counts[others], tables.counts[others])


@pytest.mark.parametrize("rows", [1, 64])
def test_scores_of_given_tokens_equal_their_reference(rows: int) -> None:
    logits, _, _ = sampler_inputs(rows, seed=rows)
    tokens = jnp.asarray(np.random.default_rng(rows).integers(0, VOCAB, rows), jnp.int32)

    def run(implementation: Implementation) -> TokenScores:
        target = Target.here().replace(implementation=implementation)
        scored = functools.partial(score, vocab=VOCAB, alternatives=20, target=target)
        return jax.jit(scored)(logits, tokens)

    got, expected = run("triton"), run("reference")
    np.testing.assert_array_equal(got.rank, expected.rank)
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.top, expected.top, rtol=1e-4, atol=1e-4)
