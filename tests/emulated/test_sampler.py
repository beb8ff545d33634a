"""The sampler's kernels on the emulator against their reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.sampler import (
    IN_PROMPT,
    MAX_BIASES,
    SUPPRESSED,
    RowAdjustments,
    RowSampling,
    SlotTables,
)
from jaxserve_kernels.sampler import reference as sampler_reference
from jaxserve_kernels.sampler import triton as sampler_triton
from tests.emulator.targets import HOPPER


def sampler_inputs(seed: int, *, rows: int, vocab: int, padded: int) -> tuple[Any, ...]:
    """Every kind of sampling with every feature, by chance."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, padded)).astype(np.float32)
    logits[:, vocab:] = 100.0

    def column(*values: float, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.choice(values, rows), dtype)

    sampling = RowSampling(
        active=jnp.asarray(rng.random(rows) < 0.9),
        temperature=column(0.0, 0.3, 1.0, 2.0),
        top_k=column(0, 0, 5, 64, 100, dtype="int32"),
        top_p=column(1.0, 1.0, 0.9, 0.3),
        min_p=column(0.0, 0.0, 0.1),
        seed=jnp.asarray(rng.integers(-(2**31), 2**31, rows), jnp.int32),
        position=jnp.asarray(rng.integers(1, 40_000, rows), jnp.int32),
    )
    slots = rows + 2
    counts = rng.integers(0, 5, (slots, padded)) * (rng.random((slots, padded)) < 0.2)
    counts = np.where(rng.random(counts.shape) < 0.2, counts | IN_PROMPT, counts)
    biases = np.full((slots, 3, MAX_BIASES), 2**31 - 1, np.int32)
    for row in biases:
        count = rng.integers(1, 40)
        row[0, :count] = np.sort(rng.integers(0, vocab, count))
        row[1, :count] = rng.choice([-100.0, 5.0, SUPPRESSED], count).astype("f4").view("i4")
        row[2, :count] = rng.choice([10, 20_000, 2**31 - 1], count)
    masks = rng.integers(-(2**31), 2**31, (slots, padded // 32))
    masks[::3, 1:] = 0
    tables = SlotTables(
        jnp.asarray(counts, jnp.int16),
        jnp.asarray(biases.reshape(slots, -1)),
        jnp.asarray(masks, jnp.int32),
    )
    adjustments = RowAdjustments(
        features=column(0, 0, 1, 2, 3, 4, 5, 6, 7, dtype="int32"),
        slots=jnp.asarray(rng.permutation(slots)[:rows], jnp.int32),
        presence=column(-2.0, 0.0, 1.5),
        frequency=column(-1.0, 0.0, 2.0),
        repetition=column(1.0, 1.3, 0.7, 1e-9),
    )
    return jnp.asarray(logits), sampling, adjustments, tables, jnp.asarray(rng.random(rows) < 0.5)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # what is too large is clipped
def test_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    inputs = sampler_inputs(0, rows=16, vocab=300, padded=320)
    got = sampler_triton.sample(*inputs, vocab=300, alternatives=20, target=HOPPER)
    expected = sampler_reference.sample(*inputs, vocab=300, alternatives=20)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.tables.counts, expected.tables.counts)
    wanted = np.asarray(inputs[-1])
    np.testing.assert_array_equal(got.logprobs.top_ids[wanted], expected.logprobs.top_ids[wanted])
    np.testing.assert_allclose(
        got.logprobs.top[wanted], expected.logprobs.top[wanted], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        got.logprobs.sampled, expected.logprobs.sampled, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy is not used to such scores
@pytest.mark.parametrize(
    ("bad", "temperature", "top_k", "top_p", "min_p"),
    [
        (np.nan, 0.0, 0, 1.0, 0.0),
        (np.nan, 1.0, 0, 0.9, 0.0),
        (np.nan, 1.0, 100, 1.0, 0.0),
        (-np.inf, 1.0, 100, 1.0, 0.0),
        (np.nan, 1.0, 20, 1.0, 0.0),
        (np.inf, 1.0, 100, 1.0, 0.1),
    ],
)
def test_scores_that_are_no_numbers_still_choose_a_token_that_exists(
    monkeypatch: pytest.MonkeyPatch,
    bad: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Its score is read and its count written; the logprob tells that the row is worth nothing."""
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    logits, sampling, adjustments, tables, _ = sampler_inputs(0, rows=2, vocab=300, padded=320)
    none, one = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.float32)
    sampling = sampling._replace(
        active=none == 0, temperature=temperature * one, top_k=none + top_k,
        top_p=top_p * one, min_p=min_p * one,
    )  # fmt: skip
    adjustments = adjustments._replace(features=none)
    first = logits.at[0, 5].set(bad) if bad == np.inf else logits.at[0].set(jnp.float32(bad))

    def sample(logits: Any) -> Any:
        return sampler_triton.sample(
            logits,
            sampling,
            adjustments,
            tables,
            none != 0,
            vocab=300,
            alternatives=20,
            target=HOPPER,
        )

    got, without = sample(first), sample(logits)
    assert 0 <= int(got.tokens[0]) < 300
    assert np.isnan(got.logprobs.sampled[0])
    assert got.tokens[1] == without.tokens[1]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_penalties_leave_scores_that_exclude_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not chosen where the only other one is suppressed."""
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    logits, sampling, adjustments, tables, wanted = sampler_inputs(0, rows=4, vocab=300, padded=320)
    logits = jnp.full_like(logits, -jnp.inf).at[:, 200].set(SUPPRESSED)
    everything = jnp.full_like(tables.masks, -1)
    inputs = (
        logits,
        sampling._replace(active=wanted | True),
        adjustments._replace(features=jnp.asarray([1, 5, 1, 5], jnp.int32)),
        tables._replace(masks=everything),
        wanted,
    )
    got = sampler_triton.sample(*inputs, vocab=300, alternatives=1, target=HOPPER)
    expected = sampler_reference.sample(*inputs, vocab=300, alternatives=1)
    assert expected.tokens.tolist() == [200] * 4
    np.testing.assert_array_equal(got.tokens, expected.tokens)


def test_scores_of_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    logits = sampler_inputs(1, rows=6, vocab=300, padded=320)[0]
    tokens = jnp.asarray([0, 299, 7, 64, 63, 128], jnp.int32)
    got = sampler_triton.score(logits, tokens, vocab=300, alternatives=20, target=HOPPER)
    expected = sampler_reference.score(logits, tokens, vocab=300, alternatives=20)
    np.testing.assert_array_equal(got.rank, expected.rank)
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.top, expected.top, rtol=1e-5, atol=1e-5)
