"""HQQ and AWQ: each against its definition, and better than rounding at what it is made for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve_kernels.weights import quantize_int4
from jaxserve_kernels.weights.awq import (
    output_error,
    quantize_int4_clipped,
    search_scale,
    statistics,
)
from jaxserve_kernels.weights.hqq import quantize_int4_hqq

OUT, DEPTH, GROUP = 64, 256, 128


hqq = jax.jit(lambda w: quantize_int4_hqq(w, GROUP).dequantize())


def matrix() -> NDArray[np.float32]:
    """Weights with heavy tails."""
    rng = np.random.default_rng(0)
    return (0.02 * rng.standard_t(4, (OUT, DEPTH))).astype(np.float32)


def hqq_group(w: NDArray[np.float32], iterations: int) -> NDArray[np.float32]:
    """One group as the paper has it, in NumPy; the zero point with the least mean error is kept."""
    scale = np.float32(15) / (w.max() - w.min())
    zero = -w.min() * scale
    best, least = zero, np.inf
    beta = 10.0
    for _ in range(iterations + 1):
        codes = np.clip(np.round(w * scale + zero), 0, 15)
        error = w - (codes - zero) / scale
        if np.abs(error).mean() < least:
            best, least = zero, np.abs(error).mean()
        size = np.abs(error)
        shrunk = np.sign(error) * np.maximum(size - np.maximum(size, 1e-30) ** -0.3 / beta, 0)
        zero = (codes - (w - shrunk) * scale).mean(dtype=np.float32)
        beta *= 1.01
    return (np.clip(np.round(w * scale + best), 0, 15) - best) / scale


def test_hqq_moves_zero_points_as_the_paper_says() -> None:
    w = matrix()
    found = hqq(w)
    groups = w.reshape(-1, GROUP)
    expected = np.stack([hqq_group(group, 20) for group in groups]).reshape(w.shape)
    # Sums in another order may tip a code on an edge, in some iteration of few groups.
    assert np.isclose(found, expected, rtol=1e-3, atol=1e-5).mean() > 0.95
    np.testing.assert_allclose(np.abs(found - w).mean(), np.abs(expected - w).mean(), rtol=2e-3)
    first = np.stack([hqq_group(group, 0) for group in groups]).reshape(w.shape)
    assert np.abs(found - w).mean() < 0.98 * np.abs(first - w).mean()


def test_hqq_keeps_constant_groups() -> None:
    w = np.zeros((OUT, DEPTH), np.float32)
    w[1] = 0.25
    found = hqq(w)
    np.testing.assert_allclose(found, w, atol=1e-6)


def inputs() -> NDArray[np.float32]:
    """Tokens with a few channels that are much larger than the rest."""
    x = np.random.default_rng(1).normal(size=(512, DEPTH)).astype(np.float32)
    x[:, ::50] *= 30
    return x


def test_errors_of_a_product_follow_from_the_inputs_second_moments() -> None:
    x, difference = inputs(), matrix()
    expected = ((x @ difference.T) ** 2).sum(axis=1).mean()
    found = output_error(jnp.asarray(difference), statistics(jnp.asarray(x)).moment)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_scales_protect_the_inputs_that_are_large() -> None:
    w, x = matrix(), inputs()
    known = statistics(jnp.asarray(x))

    def rounded(wide: jax.Array) -> jax.Array:
        return quantize_int4(wide).dequantize()

    @jax.jit
    def search(w: jax.Array) -> tuple[jax.Array, ...]:
        scale = search_scale(w, known, rounded)
        scaled = rounded(w * scale) / scale
        clipped = quantize_int4_clipped(w * scale, known.moment / scale / scale[:, None])
        restored = clipped.dequantize() / scale
        return scale, *(
            output_error(each - w, known.moment) for each in (rounded(w), scaled, restored)
        )

    scale, plain, scaled, clipped = map(np.asarray, search(jnp.asarray(w)))
    assert scale[::50].min() > scale[1::50].max()
    assert scaled < 0.5 * plain
    assert clipped < scaled
