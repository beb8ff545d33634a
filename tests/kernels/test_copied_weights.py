"""Copies in fp8 beside 4-bit weights: near what the codes mean, and read by products of many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.matmul import add_linear, as_read, gated_linear, linear
from jaxserve_kernels.target import CPU

LAYERS, OUT, DEPTH, FEW, MANY = 2, 128, 256, 64, 65


def with_zeros(weight: jax.Array) -> weights.Int4Weight:
    packed = weights.quantize_int4(weight, group=32)
    return packed._replace(zero=jax.random.randint(jax.random.key(1), packed.scale.shape, 5, 11))


def in_another_order(weight: jax.Array) -> weights.OrderedInt4Weight:
    packed = weights.quantize_int4(weight)
    order = jax.random.permutation(jax.random.key(2), weight.shape[-1]).astype(jnp.int32)
    return weights.OrderedInt4Weight(packed.packed, packed.scale, jnp.stack([order] * LAYERS))


QUANTIZE: dict[str, Callable[[jax.Array], Any]] = {
    "int4": weights.quantize_int4,
    "int4-zeros": with_zeros,
    "int4-act-order": in_another_order,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}


@functools.cache
def of_all_formats() -> dict[str, Any]:
    """Stacked layers, the first row of which is 0: with copies, and what codes and copies mean."""

    @jax.jit
    def make(plain: jax.Array) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, quantize in QUANTIZE.items():
            codes = quantize(plain)
            copy = weights.e4m3_copy(codes)
            weight = weights.CopiedWeight(codes, copy)
            made[name] = weight, weight.codes.dequantize(), copy.dequantize()
        return made

    plain = jax.random.normal(jax.random.key(7), (LAYERS, OUT, DEPTH)) * 0.02
    return make(plain.at[:, 0].set(0.0))


@pytest.mark.parametrize("name", QUANTIZE)
def test_a_copy_has_what_its_codes_mean_rounded_to_e4m3(name: str) -> None:
    """Half of the last of four significant bits at most, and so 2^-4 of a value; less in the mean.
    Small ones are not so fine: 2^-10 of the scale. MXFP4 needs no rounding."""
    weight, *values = of_all_formats()[name]
    meant, rounded = map(np.asarray, values)
    assert weight.copy.scale.shape == (LAYERS, OUT // 64, 1, 64)
    scale = np.asarray(weights.layout.untile_rows(weight.copy.scale))
    limit = 0.0 if name == "mxfp4" else np.maximum(np.abs(meant) / 16, scale * 2**-10) * 1.0001
    assert np.all(np.abs(rounded - meant) <= limit)
    assert np.linalg.norm(rounded - meant) < 0.03 * np.linalg.norm(meant)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_products_of_many_read_the_copy_and_of_few_the_codes(tokens: int) -> None:
    """Here in activation order, of which a copy knows nothing."""
    weight = jax.tree.map(lambda leaf: leaf[1], of_all_formats()["int4-act-order"][0])
    part = weight.codes if tokens == FEW else weight.copy
    x = jax.random.normal(jax.random.key(tokens), (tokens, DEPTH), jnp.bfloat16)
    total = jnp.ones((tokens, OUT), jnp.bfloat16)

    @jax.jit
    def products(x: jax.Array, total: jax.Array, weight: Any) -> Any:
        return (
            linear(x, weight, target=CPU),
            gated_linear(x, weight, target=CPU),
            add_linear(total, x, weight, target=CPU),
        )

    for one, other in zip(
        jax.tree.leaves(products(x, total, weight)),
        jax.tree.leaves(products(x, total, part)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_a_program_does_not_take_what_it_does_not_read() -> None:
    weight = of_all_formats()["nvfp4"][0]
    tree = {"matrix": weight, "norm": jnp.ones(3)}
    assert as_read(tree, FEW, target=CPU)["matrix"] is weight.codes
    assert as_read(tree, MANY, target=CPU)["matrix"] is weight.copy
    assert as_read(tree, MANY, target=CPU)["norm"] is tree["norm"]
    for tokens, arrays in ((FEW, 1 + 3), (MANY, 1 + 2)):
        x = jax.ShapeDtypeStruct((tokens, DEPTH), jnp.float32)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weight)
        lowered = jax.jit(functools.partial(linear, target=CPU)).lower(x, one).as_text()
        (header,) = (line for line in lowered.splitlines() if "@main(" in line)
        assert header.count("%arg") == arrays
