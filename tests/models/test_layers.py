"""Building blocks against their formulas in numpy float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve.layer_spec import AttentionSpec, LinearScaling, Llama3Scaling, Rope, YarnScaling
from jaxserve.models.rope import rope_frequencies, rope_tables
from jaxserve_kernels.add_rms_norm import add_rms_norm, rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs, rope
from jaxserve_kernels.dense_matmul import gated_linear, linear, sum_parts
from jaxserve_kernels.target import CPU
from tests.tiny_model import SPEC

type Floats = NDArray[np.floating[Any]]

EPS = 1e-6
THETA = 1_000_000.0
YARN = YarnScaling(factor=4.0, original_max_position=32_768)

type Scaling = LinearScaling | Llama3Scaling | YarnScaling


def long_heads(scaling: Scaling | None = None) -> AttentionSpec:
    rope = Rope(theta=THETA, scaling=scaling)
    return AttentionSpec(q_heads=4, kv_heads=2, head_dim=128, rope=rope)


def long_frequencies(scaling: Scaling | None = None) -> NDArray[np.float32]:
    return rope_frequencies(long_heads(scaling).rope, 128)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def exact_rms_norm(x: Floats, weight: Floats) -> Floats:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


def exact_rope(x: Floats, positions: NDArray[np.int32], frequencies: Floats) -> Floats:
    """Pairs (i, i + half) as complex numbers, turned by position times frequency."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[:, None, None] * frequencies.astype(np.float64))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_linear_takes_weights_as_they_lie_on_disk() -> None:
    x, weight = normal(5, 16), normal(24, 16, seed=1)
    parts = linear(jnp.asarray(x), jnp.asarray(weight), target=CPU)
    got = sum_parts(parts, jnp.float32)
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.T, rtol=0, atol=1e-5)
    narrow = linear(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), target=CPU)
    assert narrow.dtype == jnp.bfloat16


def test_partial_sums_are_added_before_they_are_rounded() -> None:
    parts = normal(4, 3, 8)
    expected = parts.astype(np.float64).sum(0)
    got = sum_parts(jnp.asarray(parts), jnp.bfloat16)
    np.testing.assert_array_equal(got, expected.astype(np.float32).astype(jnp.bfloat16))


def test_the_gated_product_gates_the_second_half_with_the_first() -> None:
    x, weight = normal(3, 16), normal(14, 16, seed=1)
    product = x.astype(np.float64) @ weight.T
    gate, up = product[:, :7], product[:, 7:]
    expected = gate / (1 + np.exp(-gate)) * up
    got = gated_linear(jnp.asarray(x), jnp.asarray(weight), target=CPU)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_mean_square(scale: float) -> None:
    """1e-4 is where epsilon matters."""
    x, weight = normal(4, 32) * np.float32(scale), normal(32, seed=1)
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS)
    np.testing.assert_allclose(got, exact_rms_norm(x, weight), rtol=2e-6, atol=1e-6)


def test_rms_norm_rounds_once_before_the_weight_as_transformers_does() -> None:
    x = jnp.asarray(normal(4, 32), jnp.bfloat16)
    weight = jnp.asarray(1 + 0.3 * normal(32, seed=1), jnp.bfloat16)
    unit = exact_rms_norm(np.asarray(x, np.float64), np.ones(32)).astype(jnp.bfloat16)
    expected = jnp.asarray(unit) * weight
    got = rms_norm(x, weight, EPS)
    assert got.dtype == jnp.bfloat16
    # float32 and float64 may round to different neighbours, rarely.
    assert (np.asarray(got) == np.asarray(expected)).mean() > 0.98


def test_the_residual_norm_returns_the_sum_and_its_norm() -> None:
    x, parts, weight = normal(4, 32), normal(3, 4, 32, seed=1), normal(32, seed=2)
    bias = normal(32, seed=3)
    arrays = map(jnp.asarray, (x, parts, weight))
    total, normed = add_rms_norm(*arrays, EPS, bias=jnp.asarray(bias), target=CPU)
    expected = x + parts.sum(0) + bias
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(normed, exact_rms_norm(expected, weight), rtol=0, atol=2e-6)


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_rope_turns_pairs_by_position_times_frequency(first: int) -> None:
    x = normal(6, 3, SPEC.head_dim)
    positions = np.arange(first, first + 6, dtype=np.int32)
    got = rope(jnp.asarray(x), *rope_tables(SPEC.attention, jnp.asarray(positions)))
    expected = exact_rope(x, positions, rope_frequencies(SPEC.attention.rope, SPEC.head_dim))
    # float32 angles near 1,000 are off by up to 3e-5.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 if first < 10 else 2e-4)


@given(distance=st.integers(0, 200), shift=st.integers(0, 800))
def test_scores_depend_on_distance_and_not_on_position(distance: int, shift: int) -> None:
    x = np.repeat(normal(1, 1, SPEC.head_dim), 4, axis=0)
    positions = jnp.asarray([0, distance, shift, shift + distance], jnp.int32)
    turned = np.asarray(rope(jnp.asarray(x), *rope_tables(SPEC.attention, positions)), np.float64)[
        :, 0
    ]
    assert turned[0] @ turned[1] == pytest.approx(turned[2] @ turned[3], abs=1e-3)


def test_frequencies_fall_from_one_to_the_inverse_of_theta() -> None:
    frequencies = long_frequencies()
    assert frequencies.dtype == np.float32 and frequencies.shape == (64,)
    assert frequencies[0] == 1.0
    ratios = frequencies[1:] / frequencies[:-1]
    np.testing.assert_allclose(ratios, THETA ** (-1 / 64), rtol=1e-6)


def test_yarn_keeps_fast_rotations_and_slows_down_slow_ones() -> None:
    plain, scaled = long_frequencies(), long_frequencies(YARN)
    turns = plain * YARN.original_max_position / (2 * math.pi)
    fast, slow = turns > YARN.beta_fast * 1.5, turns < YARN.beta_slow / 1.5
    assert fast.any() and slow.any()
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / YARN.factor, rtol=1e-6)
    ratio = plain / scaled
    assert (np.diff(ratio) >= -1e-6).all() and (~fast & ~slow).any()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_between_the_pairs_that_turn_often_and_rarely(truncate: bool) -> None:
    """In equal steps from one to the other; whole pairs only if they are truncated."""
    yarn = replace(YARN, truncate=truncate)
    plain, scaled = long_frequencies(), long_frequencies(yarn)
    turns = np.log(plain * YARN.original_max_position / (2 * math.pi))
    pairs = np.arange(64)
    low, high = (np.interp(-math.log(turn), -turns, pairs) for turn in (32.0, 1.0))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    slow = np.clip((pairs - low) / (high - low), 0, 1)
    np.testing.assert_allclose(scaled, plain * (1 - slow + slow / YARN.factor), rtol=1e-5)


def test_yarn_sharpens_attention() -> None:
    """0.1 ln(4) + 1 on queries and on keys, unless the checkpoint says otherwise."""
    positions = jnp.asarray([0], jnp.int32)
    for factor, expected in ((None, 0.1 * math.log(4) + 1), (1.25, 1.25)):
        yarn = replace(YARN, attention_factor=factor)
        cos, sin = rope_tables(long_heads(yarn), positions)
        np.testing.assert_allclose(cos, np.full((1, 64), expected), rtol=1e-6)
        assert not np.asarray(sin).any()


def test_yarn_with_factor_one_changes_nothing() -> None:
    """Not even where the blend has no width: a context shorter than one rotation."""
    short = YarnScaling(factor=1.0, original_max_position=4)
    for yarn in (replace(YARN, factor=1.0), short):
        np.testing.assert_allclose(long_frequencies(yarn), long_frequencies(), rtol=1e-6)


def test_attention_inputs_norm_and_rotate_per_head_and_store_keys_and_values() -> None:
    tokens, q_heads, kv_heads, head_dim = 5, 4, 2, SPEC.head_dim
    parts = normal(2, tokens, (q_heads + 2 * kv_heads) * head_dim)
    qkv = parts.sum(0)
    q_norm, k_norm = normal(2, head_dim, seed=1)
    kv = normal(2, 6, kv_heads, 2, 4, head_dim, seed=2)
    pages, offsets = np.int32([3, 3, 1, 5, 2]), np.int32([0, 3, 2, 1, 1])
    positions = np.int32([7, 8, 0, 40, 3])
    q, after = attention_inputs(
        jnp.asarray(parts),
        jnp.asarray(kv),
        1,
        HeadWeights(jnp.asarray(q_norm), jnp.asarray(k_norm)),
        rope_tables(SPEC.attention, jnp.asarray(positions)),
        KVSlots(jnp.asarray(pages), jnp.asarray(offsets)),
        eps=EPS,
        dtype=jnp.float32,
        target=CPU,
    )
    heads = qkv.reshape(tokens, -1, head_dim)
    frequencies = rope_frequencies(SPEC.attention.rope, SPEC.head_dim)
    queries = exact_rope(exact_rms_norm(heads[:, :4], q_norm), positions, frequencies)
    keys = exact_rope(exact_rms_norm(heads[:, 4:6], k_norm), positions, frequencies)
    expected = kv.copy()
    expected[1, pages, :, 0, offsets] = keys
    expected[1, pages, :, 1, offsets] = heads[:, 6:]
    np.testing.assert_allclose(q, queries, rtol=0, atol=1e-5)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5)
    untouched = np.ones(kv.shape, bool)
    untouched[1, pages, :, :, offsets] = False
    np.testing.assert_array_equal(np.asarray(after)[untouched], kv[untouched])


def test_llama3_divides_slow_rotations_and_blends_to_fast_ones() -> None:
    """As transformers' _compute_llama3_parameters."""
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    plain, scaled = long_frequencies(), long_frequencies(scaling)
    lengths = 2 * math.pi / plain.astype(np.float64)
    smooth = (8192 / lengths - 1.0) / 3.0
    blended = (1 - smooth) * plain / 8.0 + smooth * plain
    expected = np.where(lengths > 8192, plain / 8.0, np.where(lengths < 2048, plain, blended))
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)
    assert 0 < ((lengths < 8192) & (lengths > 2048)).sum() < 64


def test_linear_scaling_divides_all_rotations() -> None:
    scaled = long_frequencies(LinearScaling(factor=4.0))
    np.testing.assert_allclose(scaled, long_frequencies() / 4, rtol=1e-6)


def test_another_scale_of_scores_is_in_the_rotations_of_queries_and_keys() -> None:
    heads = long_heads()
    positions = jnp.asarray([3, 17], jnp.int32)
    x = jnp.asarray(normal(2, 1, 128))

    def score(attention: AttentionSpec) -> float:
        turned = np.asarray(rope(x, *rope_tables(attention, positions)), np.float64)[:, 0]
        return turned[0] @ turned[1] * 128**-0.5

    expected = score(heads) * 128**0.5 * 0.07
    assert score(replace(heads, scale=0.07)) == pytest.approx(expected, rel=1e-5)
