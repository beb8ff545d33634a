"""Heads of a projection with and without norms and biases, against numpy."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.attention_inputs.reference import heads_of
from tests.kernels.kv_steps import EPS, HEADS, head_weights

TOKENS, Q_HEADS, KV_HEADS, DIM = 3, 6, 2, 8
WIDTH = (Q_HEADS + 2 * KV_HEADS) * DIM


def tables(angles: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[jnp.ndarray, ...]:
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


@pytest.mark.parametrize("options", HEADS)
def test_each_head_is_biased_normed_and_rotated_as_the_model_has_it(options: str) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, TOKENS, WIDTH))
    angles = rng.uniform(0, 10, (TOKENS, DIM // 2))
    weights = head_weights(options, Q_HEADS, KV_HEADS, DIM)
    found = heads_of(
        jnp.asarray(parts, jnp.float32), weights, tables(angles),
        kv_heads=KV_HEADS, eps=EPS, dtype=jnp.float32,
    )  # fmt: skip

    flat = parts.sum(0) + (0 if weights.bias is None else np.asarray(weights.bias))
    heads = flat.reshape(TOKENS, -1, DIM)
    q, k, v = np.split(heads, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
    for got, wide, norm in ((found[0], q, weights.q_norm), (found[1], k, weights.k_norm)):
        if norm is not None:
            wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * np.asarray(norm)
        turned = wide.astype(complex)[..., : DIM // 2] + 1j * wide[..., DIM // 2 :]
        turned = turned * np.exp(1j * angles)[:, None]
        expected = np.concatenate([turned.real, turned.imag], axis=-1)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[2], v, rtol=0, atol=1e-6)


def test_the_bias_is_added_before_the_sum_is_rounded() -> None:
    """Torch's addmm rounds once: 1 + 3/512 to bfloat16 is 1 + 1/128, but 1 + 1/256, rounded first,
    is 1, and 1 + 1/512 is 1 again."""
    qkv = jnp.full((1, 1, WIDTH), 1 + 1 / 256, jnp.float32)
    weights = HeadWeights(bias=jnp.full(WIDTH, 1 / 512, jnp.bfloat16))
    still = tables(np.zeros((1, DIM // 2)))
    found = heads_of(qkv, weights, still, kv_heads=KV_HEADS, eps=EPS, dtype=jnp.bfloat16)
    once = np.float32(1 + 3 / 512).astype(ml_dtypes.bfloat16)
    assert float(once) == 1 + 1 / 128
    for each in found:
        np.testing.assert_array_equal(np.asarray(each), once)


def test_one_norm_without_the_other_is_refused() -> None:
    weights = HeadWeights(q_norm=jnp.ones(DIM))
    still = tables(np.zeros((1, DIM // 2)))
    with pytest.raises(ValueError, match="one norm is missing"):
        heads_of(
            jnp.zeros((1, 1, WIDTH)), weights, still, kv_heads=KV_HEADS, eps=EPS, dtype=jnp.float32
        )
