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
from jaxserve_kernels.quantized_matmul.e4m3 import hopper, hopper_bytes, hopper_converting
from jaxserve_kernels.quantized_matmul.e4m3.tokens import Order, TokenFormat, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_convert import to_fp8
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from tests.emulated.errors import relative_error
from tests.emulated.weights import (
    WEIGHTS,
    gated_product,
    gating,
    product,
    tokens_and_weight,
    tokens_in_8_bits,
)

GATED = 1e-3
"""Some sums are rounded to the other neighbour in bfloat16."""


def in_e4m3(
    module: Any, x: jax.Array, weight: Any, config: Config, *, gated: bool
) -> np.ndarray[Any, Any]:
    """Of tokens in e4m3: the sum of its parts, or gated."""
    codes = quantized(x, format_for(weight, x.shape[0], config))
    return (gated_product if gated else product)(module, codes, weight, config)


@pytest.mark.parametrize("multiprocessors", [132, 3], ids=["pieces", "turns"])
@pytest.mark.parametrize(
    ("rows", "stages", "splits"), [(256, 4, 1), (128, 6, 1), (128, 6, 3)], ids=str
)
def test_fp8_weights(
    rows: int, stages: int, splits: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs have fewer tiles than multiprocessors, and where they have several."""
    monkeypatch.setattr(hopper_bytes, "MULTIPROCESSORS", multiprocessors)
    x, weight = tokens_and_weight(200, 512, 640, weights.quantize_fp8)
    config = Config(
        method="hopper", rows=rows, tokens=128, num_stages=stages, splits=splits, pieces=4
    )
    expected = tokens_in_8_bits(x, weight) @ np.asarray(weight.dequantize()).T
    found = in_e4m3(hopper_bytes, x, weight, config, gated=False)
    assert relative_error(found, expected) < 1e-6
    if splits == 1:
        both = in_e4m3(hopper_bytes, x, weight, config, gated=True)
        assert relative_error(both, gating(expected)) < GATED


BOUNDS = {"int4": 1.5e-2, "int4-g64": 1.5e-2, "int4-zeros": 1.5e-2, "nvfp4": 2.5e-2, "mxfp4": 1e-6}
"""Zeros of integers are a product in bfloat16; NVFP4's values times scales are rounded to e4m3."""


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("tokens", "splits"), [(100, 1), (200, 3)], ids=str)
def test_weights_of_4_bits(
    name: str, tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated, three programs share four tiles: who has a tile's beginning ends it."""
    monkeypatch.setattr(hopper, "_PROGRAMS", 3)
    x, weight = tokens_and_weight(tokens, 512, 1024, WEIGHTS[name])
    tile, stages = (128, 6) if tokens <= 128 else (256, 4)
    config = Config(method="hopper", rows=128, tokens=tile, num_stages=stages, splits=splits)
    expected = tokens_in_8_bits(x, weight) @ np.asarray(weight.dequantize()).T
    found = in_e4m3(hopper, x, weight, config, gated=False)
    assert relative_error(found, expected) < BOUNDS[name]
    whole = Config(method="hopper", rows=128, tokens=tile, num_stages=stages)
    both = in_e4m3(hopper, x, weight, whole, gated=True)
    assert relative_error(both, gating(expected)) < GATED + 1.5 * BOUNDS[name]


@pytest.mark.parametrize(
    ("tokens", "out", "depth", "multiprocessors", "config"),
    [
        (130, 512, 512, 132, {"rows": 256, "num_stages": 3, "unroll": 3}),
        (257, 768, 256, 4, {"rows": 256, "num_stages": 2, "unroll": 3}),
        (100, 512, 384, 3, {"rows": 128, "num_stages": 4, "unroll": 5}),
        (128, 256, 640, 132, {"rows": 128, "num_stages": 4, "unroll": 2, "splits": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BOUNDS)
def test_weights_of_4_bits_that_a_warpgroup_converts(
    name: str,
    tokens: int,
    out: int,
    depth: int,
    multiprocessors: int,
    config: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces alone; whole tiles and pieces; steps that end before the ring of codes is full. What
    is made are the copy's bytes, those of NVFP4 with ties to even."""
    monkeypatch.setattr(hopper_converting, "MULTIPROCESSORS", multiprocessors)
    x, weight = tokens_and_weight(tokens, out, depth, WEIGHTS[name])
    made = to_fp8(weight) if name == "nvfp4" else weights.e4m3_copy(weight)
    expected = tokens_in_8_bits(x, weight) @ np.asarray(made.dequantize()).T
    chosen = Config(method="hopper", tokens=128, pieces=2, **config)
    padded = -(-tokens // 128) * 128
    codes = quantized(x, TokenFormat(jnp.float8_e4m3fn, Order.INPUTS, 0, padded))
    row_scale = weights.e4m3_scale(weight)
    shape = jax.ShapeDtypeStruct((chosen.splits, tokens, out), jnp.float32)
    found = hopper_converting.launch(codes, weight, row_scale, chosen, shape, gated=False)
    assert relative_error(found.sum(0), expected) < 1e-6
    if chosen.splits == 1:
        shape = jax.ShapeDtypeStruct((tokens, out // 2), jnp.bfloat16)
        both = hopper_converting.launch(codes, weight, row_scale, chosen, shape, gated=True)
        assert relative_error(both, gating(expected)) < GATED


@pytest.mark.parametrize("multiprocessors", [132, 3], ids=["pieces", "turns"])
def test_weights_in_bfloat16(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MULTIPROCESSORS", multiprocessors)
    x, weight = tokens_and_weight(300, 512, 256, lambda values: values.astype(jnp.bfloat16))
    both = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    assert relative_error(dense.gated_linear(x, weight), gating(both)) < GATED
