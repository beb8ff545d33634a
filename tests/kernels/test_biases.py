"""Products with biases and activations, with plain and quantised weights, against numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve_kernels.activation import Activation, activate
from jaxserve_kernels.matmul import add_linear, gated_linear, linear, sum_parts
from jaxserve_kernels.target import CPU
from jaxserve_kernels.weights import quantize_int4

TOKENS, DEPTH, OUT = 3, 128, 128


def weight_of(kind: str) -> tuple[Any, np.ndarray[Any, Any]]:
    values = np.random.default_rng(1).standard_normal((OUT, DEPTH)) / np.sqrt(DEPTH)
    plain = jnp.asarray(values, jnp.float32)
    if kind == "plain":
        return plain, np.asarray(plain)
    packed = quantize_int4(plain)
    return packed, np.asarray(packed.dequantize())


def given() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((TOKENS, DEPTH)), rng.standard_normal(OUT)
    return jnp.asarray(x, jnp.float32), jnp.asarray(bias, jnp.float32)


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_a_bias_is_part_of_the_product(kind: str) -> None:
    weight, values = weight_of(kind)
    x, bias = given()
    expected = np.asarray(x) @ values.T + np.asarray(bias)
    product = sum_parts(linear(x, weight, bias=bias, target=CPU), jnp.float32)
    np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5)
    total = jnp.ones((TOKENS, OUT), jnp.float32)
    kept, update = add_linear(total, x, weight, biased=True, target=CPU)
    assert update is not None
    added = kept + sum_parts(update, jnp.float32, bias)
    np.testing.assert_allclose(added, expected + 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_gated_products(kind: str, biased: bool, activation: Activation) -> None:
    weight, values = weight_of(kind)
    x, bias = given()
    found = gated_linear(
        x, weight, bias=bias if biased else None, activation=activation, target=CPU
    )
    both = np.asarray(x, np.float64) @ values.T + (np.asarray(bias) if biased else 0)
    gate, up = np.split(both, 2, axis=1)
    if activation == "silu":
        active = gate / (1 + np.exp(-gate))
    else:
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    np.testing.assert_allclose(found, active * up, rtol=0, atol=1e-5)


def test_a_product_is_rounded_once_with_its_bias() -> None:
    """1 + 1/256 is halfway between two numbers of bfloat16, and 1/512 more decides."""
    x = jnp.ones((1, DEPTH), jnp.bfloat16)
    weight = jnp.full((OUT, DEPTH), (1 + 1 / 256) / DEPTH, jnp.float32).astype(jnp.bfloat16)
    exact = float(np.asarray(weight, np.float32)[0].sum(dtype=np.float64))
    bias = jnp.full(OUT, 1 / 512, jnp.bfloat16)
    (found,) = linear(x, weight, bias=bias, target=CPU)
    np.testing.assert_array_equal(
        np.asarray(found), np.float32(exact + 1 / 512).astype(ml_dtypes.bfloat16)
    )


def test_activations_keep_their_input_s_dtype() -> None:
    x = jnp.linspace(-3, 3, 7, dtype=jnp.float32)
    assert activate(x, "silu").dtype == activate(x, "gelu_tanh").dtype == jnp.float32
