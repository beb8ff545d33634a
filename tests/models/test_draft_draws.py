"""Drafts drawn with the target's noise are accepted as often as the formula says."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.models.drafts.draw import draw
from jaxserve_kernels.sampler import (
    MASKED,
    PENALISED,
    RowAdjustments,
    RowSampling,
    SlotTables,
    sample,
)
from jaxserve_kernels.target import CPU

VOCAB, DRAWS = 30, 6_000
DRAW = jax.jit(draw, static_argnames=("vocab", "target"))
SAMPLE = jax.jit(sample, static_argnames=("vocab", "alternatives", "target"))
TABLES = SlotTables(
    counts=jnp.full((1, 128), 100, jnp.int16),
    biases=jnp.zeros((1, 3 * 1024), jnp.int32),
    masks=jnp.full((1, 4), 0b0111_1000, jnp.int32),
)
"""One slot, whose mask allows the tokens 3 to 6 of 32; all tokens are counted."""


def rows(
    count: int, temperature: float, *, top_k: int = 0, first: int = 0, position: int = 9
) -> RowSampling:
    """A seed for each row."""
    return RowSampling(
        active=jnp.ones(count, bool),
        temperature=jnp.full(count, temperature),
        top_k=jnp.full(count, top_k),
        top_p=jnp.ones(count),
        min_p=jnp.zeros(count),
        seed=jnp.arange(first, first + count),
        position=jnp.full(count, position),
    )


def adjustments(count: int, features: int = 0) -> RowAdjustments:
    nothing = jnp.zeros(count, jnp.int32)
    penalty = jnp.full(count, 2.0)
    return RowAdjustments(nothing + features, nothing, penalty, penalty, penalty)


def drawn(scores: NDArray[np.float32], by: RowSampling, features: int = 0) -> NDArray[np.int32]:
    count = by.seed.shape[0]
    found = DRAW(
        jnp.broadcast_to(jnp.asarray(scores), (count, VOCAB)), by, adjustments(count, features),
        TABLES, vocab=VOCAB, target=CPU,
    )  # fmt: skip
    return np.asarray(found)


def sampled(scores: NDArray[np.float32], by: RowSampling) -> NDArray[np.int32]:
    """By plain decoding."""
    count = by.seed.shape[0]
    found = SAMPLE(
        jnp.broadcast_to(jnp.asarray(scores), (count, VOCAB)), by, adjustments(count), TABLES,
        jnp.zeros(count, bool), vocab=VOCAB, alternatives=1, target=CPU,
    )  # fmt: skip
    return np.asarray(found.tokens)


def softmax(scores: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    weights = np.exp((scores.astype(np.float64) - scores.max()) / temperature)
    return weights / weights.sum()


def coupled(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """The formula in the module's docstring."""
    possible = (p > 0) & (q > 0)
    p, q = p[:, None], q[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.maximum(p.T / p, q.T / q)
    return float((1 / largest[possible].sum(axis=1)).sum())


@pytest.mark.parametrize(
    ("reduced", "temperature"),
    [
        pytest.param(*case, marks=[] if case in ((False, 0.6), (True, 1.7)) else pytest.mark.slow)
        for case in product([False, True], [0.6, 1.0, 1.7])
    ],
)
def test_shared_noise_accepts_by_the_formula(temperature: float, reduced: bool) -> None:
    """Also of a head that knows a part of the vocabulary only."""
    rng = np.random.default_rng(11)
    target = (1.5 * rng.standard_normal(VOCAB)).astype(np.float32)
    own = (target + rng.standard_normal(VOCAB)).astype(np.float32)
    if reduced:
        own[rng.choice(VOCAB, 12, replace=False)] = -np.inf
    by = rows(DRAWS, temperature)
    accepted = float((drawn(own, by) == sampled(target, by)).mean())
    p, q = softmax(target, temperature), softmax(own, temperature)
    expected, independent = coupled(p, q), float((p * q).sum())
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    assert abs(accepted - expected) < 4 * error
    assert expected > independent + 10 * error, "the test could not tell"
    other = drawn(own, rows(DRAWS, temperature, position=10))
    alone = float((other == sampled(target, by)).mean())
    assert abs(alone - independent) < 4 * np.sqrt(independent * (1 - independent) / DRAWS)


def test_a_perfect_head_is_always_accepted_and_greedy_is_the_largest() -> None:
    scores = np.random.default_rng(2).standard_normal(VOCAB).astype(np.float32)
    by = rows(300, 1.0, top_k=5)
    np.testing.assert_array_equal(drawn(scores, by), sampled(scores, by))
    assert (drawn(scores, rows(3, 0.0)) == scores.argmax()).all()


def test_masks_limit_drafts_and_penalties_do_not_touch_them() -> None:
    scores = np.random.default_rng(2).standard_normal(VOCAB).astype(np.float32)
    by = rows(200, 1.0)
    masked = drawn(scores, by, MASKED)
    assert set(masked.tolist()) == {3, 4, 5, 6}
    np.testing.assert_array_equal(drawn(scores, by, PENALISED), drawn(scores, by))
