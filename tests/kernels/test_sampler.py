"""Sampling: which tokens may be drawn, how often, and that nobody else has a say in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve.api import MAX_LOGPROBS
from jaxserve_kernels.sampler import RowSampling
from jaxserve_kernels.sampler import reference as sampling

ROWS, VOCAB = 4, 40
"""One shape for all properties: one compilation."""

type Floats = NDArray[np.floating[Any]]

sample = jax.jit(sampling.choose)
truncate = jax.jit(sampling.truncate)
logprobs = jax.jit(
    functools.partial(sampling.logprobs, alternatives=MAX_LOGPROBS), static_argnames="largest"
)

LARGEST = {"reference": sampling.largest, "cpu": jax.lax.top_k}
"""What finds the most likely tokens, by implementation."""


def make_rows(count: int = ROWS, **columns: Any) -> RowSampling:
    """Active rows of plain sampling but for the given columns (scalars or one value per row)."""
    plain = {"active": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {**plain, "seed": 0, "position": 0, **columns}
    dtypes = {"active": np.bool_, "top_k": np.int32, "seed": np.int32, "position": np.int32}
    return RowSampling(
        **{
            name: jnp.asarray(np.broadcast_to(value, count).astype(dtypes.get(name, np.float32)))
            for name, value in values.items()
        }
    )


@st.composite
def logit_rows(draw: st.DrawFn) -> Floats:
    """[ROWS, VOCAB] of very different shapes: with ties, flat, peaked, partly impossible."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((ROWS, VOCAB)) * draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)
    logits += draw(st.sampled_from([0.0, 50.0, -50.0]))
    impossible = rng.random((ROWS, VOCAB)) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.9]))
    impossible[:, rng.integers(VOCAB)] = False
    # + 0.0: minus zero is not the number that zero ties with in the order of bits.
    return np.where(impossible, -np.inf, logits).astype(np.float32) + np.float32(0.0)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, list[Any]]:
    def column(*values: float) -> list[float]:
        return [draw(st.sampled_from(values)) for _ in range(ROWS)]

    return {
        "temperature": column(0.0, 0.01, 0.7, 1.0, 2.0),
        "top_k": column(0, 1, 2, 7, VOCAB - 1, VOCAB, 10**6),
        "top_p": column(1.0, 0.95, 0.5, 0.1, 1e-6),
        "min_p": column(0.0, 0.0, 0.05, 0.5, 1.0),
        "seed": [draw(st.integers(-(2**31), 2**31 - 1)) for _ in range(ROWS)],
        "position": [draw(st.integers(0, 100_000)) for _ in range(ROWS)],
    }


def kept_by_sorting(scaled: Floats, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which tokens of one row may be drawn: bool [vocab], in float64 with a sort."""
    by_rank = np.sort(scaled)[::-1].astype(np.float64)
    kth = by_rank[min(top_k or len(by_rank), len(by_rank)) - 1]
    in_top_k = scaled >= kth
    weights = np.where(in_top_k, np.exp(scaled - by_rank[0]), 0.0)
    ranked = np.sort(weights)[::-1]
    enough = np.cumsum(ranked) >= top_p * ranked.sum()
    last = ranked[int(np.argmax(enough))] if enough.any() else 0.0
    in_nucleus = (weights >= last) | (top_p >= 1)
    return in_top_k & in_nucleus & (weights >= min_p) & (weights > 0)


# Which tokens may be drawn.


@settings(max_examples=300)
@given(logits=logit_rows(), params=parameters())
def test_the_tokens_left_are_those_that_a_sort_would_leave(
    logits: Floats, params: dict[str, list[Any]]
) -> None:
    params["temperature"] = [t or 1.0 for t in params["temperature"]]
    scaled = logits / np.float32(params["temperature"])[:, None]
    kept = np.isfinite(np.asarray(truncate(jnp.asarray(scaled), make_rows(**params))))
    for row in range(ROWS):
        top_k, top_p, min_p = (params[name][row] for name in ("top_k", "top_p", "min_p"))
        # float32 sums decide differently from float64 only within this of the threshold.
        at_least = kept_by_sorting(scaled[row], top_k, top_p - 1e-6, min_p + 1e-6)
        at_most = kept_by_sorting(scaled[row], top_k, min(top_p + 1e-6, 1.0), min_p - 1e-6)
        # exp() underflows before its argument does; what is that unlikely may stay or go.
        certain = np.exp(scaled[row] - scaled[row].max()) > 1e-30
        assert not (at_least & certain & ~kept[row]).any(), "a token is missing"
        assert not (kept[row] & certain & ~at_most).any(), "a token should have been excluded"


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = np.tile(np.float32([3, 2, 2, 2, 1]), (2, 1))
    rows = make_rows(2, top_k=[2, 0], top_p=[1.0, 0.6])
    kept = np.isfinite(np.asarray(truncate(jnp.asarray(logits), rows)))
    np.testing.assert_array_equal(kept, np.tile([True, True, True, True, False], (2, 1)))


def test_top_p_measures_what_top_k_left() -> None:
    """0.4 of everything is the first token alone; of the top two, it takes 0.4 of their 0.7."""
    logits = np.log(np.float32([[0.36, 0.34, 0.1, 0.1, 0.1]]))
    alone = make_rows(1, top_p=0.5)
    after_top_k = make_rows(1, top_p=0.5, top_k=2)
    assert np.isfinite(truncate(jnp.asarray(logits), alone)).sum() == 2
    assert np.isfinite(truncate(jnp.asarray(logits), after_top_k)).sum() == 1


@settings(max_examples=100)
@given(logits=logit_rows(), params=parameters())
def test_an_impossible_token_is_never_chosen(logits: Floats, params: dict[str, list[Any]]) -> None:
    chosen = np.asarray(sample(jnp.asarray(logits), make_rows(**params)))
    assert np.isfinite(np.take_along_axis(logits, chosen[:, None], axis=1)).all()


@pytest.mark.parametrize(
    "greedy",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1.2e-38},
        {"temperature": 1.2e-38, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 1e-42},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_every_extreme_is_greedy(greedy: dict[str, float]) -> None:
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB), np.float32) * 10
    for seed in range(5):
        chosen = sample(jnp.asarray(logits), make_rows(**greedy, seed=seed))
        np.testing.assert_array_equal(chosen, logits.argmax(-1))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [7, 9]] = 1.0
    chosen = sample(jnp.asarray(logits), make_rows(temperature=0.0))
    assert np.asarray(chosen).tolist() == [7] * ROWS


# How often.


def chi_square(counts: NDArray[np.integer[Any]], probabilities: Floats) -> float:
    expected = counts.sum() * probabilities
    assert not counts[probabilities == 0].any()
    some = probabilities > 0
    return float((((counts - expected) ** 2)[some] / expected[some]).sum())


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, 12),
        ({"temperature": 0.5}, 12),
        ({"temperature": 2.0}, 12),
        ({"top_k": 5}, 5),
        ({"top_p": 0.9}, 7),
        ({"min_p": 0.2}, 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_tokens_come_as_often_as_their_probabilities_say(
    over: str, params: dict[str, Any], allowed: int
) -> None:
    """Chi-square over 8,192 draws, 1e-4 quantile of 11 degrees of freedom (fewer are lower)."""
    draws, vocab = 8192, 12
    logits = np.linspace(0, -3.3, vocab, dtype=np.float32)
    numbers = np.arange(draws)
    where = {"position": numbers} if over == "positions" else {"seed": numbers, "position": 17}
    rows = make_rows(draws, **params, **where)
    chosen = np.asarray(sample(jnp.tile(logits, (draws, 1)), rows))
    weights = np.exp(logits.astype(np.float64) / params.get("temperature", 1.0))
    weights[allowed:] = 0
    assert chi_square(np.bincount(chosen, minlength=vocab), weights / weights.sum()) < 37.4


def test_a_flat_distribution_over_a_whole_vocabulary_is_flat() -> None:
    """Noise of few bits would tie, and ties go to small ids."""
    vocab, draws = 150_000, 128
    rows = make_rows(draws, position=np.arange(draws))
    chosen = np.asarray(sample(jnp.zeros((draws, vocab)), rows))
    assert len(np.unique(chosen)) >= draws - 3
    octants = np.bincount(chosen * 8 // vocab, minlength=8)
    assert chi_square(octants, np.full(8, 1 / 8)) < 29.9  # 1e-4 quantile of 7 degrees of freedom


# What a choice depends on.


@settings(max_examples=100)
@given(logits=logit_rows(), params=parameters(), data=st.data())
def test_a_choice_depends_on_its_row_alone_and_not_on_its_place(
    logits: Floats, params: dict[str, list[Any]], data: st.DataObject
) -> None:
    together = np.asarray(sample(jnp.asarray(logits), make_rows(**params)))
    order = data.draw(st.permutations(range(ROWS)))
    shuffled = {name: [column[row] for row in order] for name, column in params.items()}
    active = np.array(data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)))
    moved = np.asarray(sample(jnp.asarray(logits[order]), make_rows(**shuffled, active=active)))
    np.testing.assert_array_equal(moved[active], together[order][active])


def test_seed_and_position_fix_a_choice_and_each_of_them_changes_it() -> None:
    draws, vocab = 64, 1000
    flat = jnp.zeros((draws, vocab))
    numbers = np.arange(draws)
    by_position = np.asarray(sample(flat, make_rows(draws, seed=3, position=numbers)))
    by_seed = np.asarray(sample(flat, make_rows(draws, seed=numbers, position=3)))
    again = np.asarray(sample(flat, make_rows(draws, seed=3, position=numbers)))
    np.testing.assert_array_equal(by_position, again)
    assert by_position[3] == by_seed[3]
    for chosen in (by_position, by_seed):
        assert len(np.unique(chosen)) > draws - 8  # 2 collisions are expected of 64 in 1,000
    others = np.arange(draws) != 3
    assert (by_position[others] == by_seed[others]).sum() <= 2, "seed and position are not swapped"


def test_negative_seeds_are_seeds_of_their_own() -> None:
    """32 bits of seed travel as an int32."""
    draws = 64
    numbers = np.arange(1, draws + 1)
    positive = sample(jnp.zeros((draws, 1000)), make_rows(draws, seed=numbers))
    negative = sample(jnp.zeros((draws, 1000)), make_rows(draws, seed=-numbers))
    assert (np.asarray(positive) == np.asarray(negative)).sum() <= 2


# What does not happen.


def test_rows_that_do_not_sample_cause_no_work_and_read_as_greedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws: list[None] = []
    inner: Callable[..., Any] = sampling._gumbel  # pyright: ignore[reportPrivateUsage]

    def counted(*args: Any) -> Any:
        jax.debug.callback(lambda: draws.append(None))
        return inner(*args)

    monkeypatch.setattr(sampling, "_gumbel", counted)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, VOCAB), np.float32))
    idle = [False, False, True, False]

    asleep = sampling.choose(logits, make_rows(active=idle, temperature=[1, 1, 0, 1], top_k=3))
    jax.effects_barrier()
    assert not draws
    np.testing.assert_array_equal(asleep, np.argmax(logits, axis=-1))

    awake = sampling.choose(logits, make_rows(active=idle, temperature=1.0, seed=5))
    jax.effects_barrier()
    assert len(draws) == 1
    quiet = ~np.array(idle)
    np.testing.assert_array_equal(awake[quiet], np.argmax(logits, axis=-1)[quiet])


# Logprobs.


def log_softmax(logits: Floats) -> Floats:
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    return wide - peak - np.log(np.exp(wide - peak).sum(-1, keepdims=True))


@pytest.mark.parametrize("implementation", LARGEST)
@settings(max_examples=50)
@given(logits=logit_rows())
def test_logprobs_are_those_of_the_model_most_likely_first(
    implementation: str, logits: Floats
) -> None:
    chosen = np.arange(ROWS, dtype=np.int32) * 7
    wanted = jnp.ones(ROWS, bool)
    largest = LARGEST[implementation]
    got = logprobs(jnp.asarray(logits), jnp.asarray(chosen), wanted, largest=largest)
    expected = log_softmax(logits)
    # Ties: the smaller id first, as a stable sort has it.
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    top = np.take_along_axis(expected, order, axis=1)
    possible = np.isfinite(top)
    # Logits near 100 have a spacing of 8e-6.
    np.testing.assert_allclose(np.asarray(got.top), top, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(got.top_ids)[possible], order[possible])
    of_chosen = np.take_along_axis(expected, chosen[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(np.asarray(got.sampled), of_chosen, rtol=0, atol=2e-5)


def test_alternatives_that_nobody_wants_are_not_looked_for() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, VOCAB), np.float32))
    got = logprobs(logits, jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, bool))
    assert not np.asarray(got.top).any() and not np.asarray(got.top_ids).any()
    np.testing.assert_allclose(
        np.asarray(got.sampled), log_softmax(np.asarray(logits))[:, 0], rtol=0, atol=2e-6
    )
