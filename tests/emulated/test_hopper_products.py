"""Products of many tokens on Hopper: partitions that copy, convert and multiply."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.dense_matmul import hopper as dense
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3 import hopper, hopper_bytes
from jaxserve_kernels.quantized_matmul.e4m3.tokens import Order, TokenFormat, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.target import Target
from tests.emulated.errors import relative_error
from tests.emulated.weights import (
    WEIGHTS,
    gated_product,
    gating,
    product,
    tokens_and_weight,
    tokens_in_8_bits,
)
from tests.emulator.targets import HOPPER, gpu

GATED = 1e-3
"""Some sums are rounded to the other neighbour in bfloat16."""


def in_e4m3(
    module: Any, x: jax.Array, weight: Any, config: Config, target: Target, *, gated: bool
) -> np.ndarray[Any, Any]:
    """Of tokens in e4m3: the sum of its parts, or gated."""
    codes = quantized(x, format_for(weight, x.shape[0], config), target=HOPPER)
    return (gated_product if gated else product)(module, codes, weight, config, target=target)


@pytest.mark.parametrize(("order", "group"), [(Order.BYTES, 0), (Order.INPUTS, 128)], ids=str)
def test_programs_of_several_short_tokens_quantise_like_those_of_one(
    order: Order, group: int
) -> None:
    x = jax.random.normal(jax.random.key(0), (4096, 256), jnp.bfloat16)
    form = TokenFormat(jnp.float8_e4m3fn, order, group, 4096)
    together = quantized(x, form, target=HOPPER)
    half = form._replace(padded=2048)
    apart = [quantized(x[at : at + 2048], half, target=HOPPER) for at in (0, 2048)]
    for name, axis in (("codes", 0), ("scale", 0), *([("sums", 1)] if group else [])):
        expected = np.concatenate([np.asarray(getattr(each, name)) for each in apart], axis)
        np.testing.assert_array_equal(np.asarray(getattr(together, name)), expected)


@pytest.mark.parametrize("multiprocessors", [132, 3], ids=["pieces", "turns"])
@pytest.mark.parametrize(
    ("rows", "stages", "splits"), [(256, 4, 1), (128, 6, 1), (128, 6, 3)], ids=str
)
def test_fp8_weights(rows: int, stages: int, splits: int, multiprocessors: int) -> None:
    """Where programs have fewer tiles than multiprocessors, and where they have several."""
    target = gpu(90, multiprocessors)
    x, weight = tokens_and_weight(200, 512, 640, weights.quantize_fp8)
    config = Config(
        method="hopper", rows=rows, tokens=128, num_stages=stages, splits=splits, pieces=4
    )
    expected = tokens_in_8_bits(x, weight) @ np.asarray(weight.dequantize()).T
    found = in_e4m3(hopper_bytes, x, weight, config, target, gated=False)
    assert relative_error(found, expected) < 1e-6
    if splits == 1:
        both = in_e4m3(hopper_bytes, x, weight, config, target, gated=True)
        assert relative_error(both, gating(expected)) < GATED


BOUNDS = {"int4": 1.5e-2, "int4-g64": 1.5e-2, "int4-zeros": 1.5e-2, "nvfp4": 2.5e-2, "mxfp4": 1e-6}
"""Zeros of integers are a product in bfloat16; NVFP4's values times scales are rounded to e4m3."""


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("tokens", "splits"), [(100, 1), (200, 3)], ids=str)
def test_weights_of_4_bits(name: str, tokens: int, splits: int) -> None:
    """Gated, three programs share four tiles: who has a tile's beginning ends it."""
    target = gpu(90, multiprocessors=3)
    x, weight = tokens_and_weight(tokens, 512, 1024, WEIGHTS[name])
    tile, stages = (128, 6) if tokens <= 128 else (256, 4)
    config = Config(method="hopper", rows=128, tokens=tile, num_stages=stages, splits=splits)
    expected = tokens_in_8_bits(x, weight) @ np.asarray(weight.dequantize()).T
    found = in_e4m3(hopper, x, weight, config, target, gated=False)
    assert relative_error(found, expected) < BOUNDS[name]
    whole = Config(method="hopper", rows=128, tokens=tile, num_stages=stages)
    both = in_e4m3(hopper, x, weight, whole, target, gated=True)
    assert relative_error(both, gating(expected)) < GATED + 1.5 * BOUNDS[name]


@pytest.mark.parametrize("multiprocessors", [132, 3], ids=["pieces", "turns"])
def test_weights_in_bfloat16(multiprocessors: int) -> None:
    target = gpu(90, multiprocessors)
    x, weight = tokens_and_weight(300, 512, 256, lambda values: values.astype(jnp.bfloat16))
    both = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    assert relative_error(dense.gated_linear(x, weight, target=target), gating(both)) < GATED
