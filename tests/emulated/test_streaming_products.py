"""Products of up to 64 tokens with PDL: rings of tiles in shared memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.dense_matmul import config as dense
from jaxserve_kernels.dense_matmul import triton_streaming as dense_streaming
from jaxserve_kernels.quantized_matmul import (
    config,
    triton_large_n,
    triton_small_m,
    triton_stream_k,
    triton_streaming,
)
from tests.emulated.errors import relative_error
from tests.emulated.weights import (
    WEIGHTS,
    as_read,
    exact,
    gated_product,
    gating,
    product,
    tokens_and_weight,
)
from tests.emulator import launch
from tests.emulator.targets import HOPPER, PDL, gpu

GATED = 1e-3
"""Some sums are rounded to the other neighbour in bfloat16."""


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_every_format_stream(name: str, tokens: int) -> None:
    """Turns of one, two and four tiles, with a rest and without, of which few may be all. In one
    program, and with one tile in a turn, as if more programs shared a multiprocessor."""
    x, weight = tokens_and_weight(tokens, 256, 1536, WEIGHTS[name])
    for gated in (False, True):  # gated products may read int8 tokens
        call = config.Call.of(weight, tokens, gated=gated, target=HOPPER)
        assert call is not None
        check_streaming(x, weight, config.streaming(call))


def check_streaming(x: Any, weight: Any, chosen: config.Config) -> None:
    whole = replace(chosen, splits=1, num_stages=3)
    alone = replace(whole, unroll=1)
    few = replace(alone, splits=6)  # of two tiles, fewer than the stages
    expected = exact(as_read(x, chosen), weight)
    for each in (chosen, replace(chosen, splits=4), whole, alone, few):
        found = product(triton_streaming, x, weight, each, PDL)
        assert relative_error(found, expected) < 1e-6
    both = gated_product(triton_streaming, x, weight, whole)
    assert relative_error(both, gating(expected)) < GATED


@pytest.mark.parametrize("depth", [2048, 2176, 2304])
@pytest.mark.parametrize("name", WEIGHTS)
def test_two_programs_share_each_tile_of_a_last_wave(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six whole tiles and two others. Halves of whole k-steps; of different lengths; with a
    rest. In whatever order programs end."""
    x, weight = tokens_and_weight(24, 512, depth, WEIGHTS[name])
    target = gpu(90, multiprocessors=2).replace(pdl=True)
    call = config.Call.of(weight, 24, gated=True, target=target)
    assert call is not None
    chosen = config.streaming(call)
    assert chosen.halved == 2
    found: list[Any] = []
    for seed in (0, 1):
        in_order = functools.partial(launch.triton_call, seed=seed)
        monkeypatch.setattr(triton_streaming, "triton_call", in_order)
        found.append(gated_product(triton_streaming, x, weight, chosen, target=target))
    assert relative_error(found[0], gating(exact(as_read(x, chosen), weight))) < GATED
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-g32", "int4-zeros"])
def test_few_tokens(name: str, tokens: int) -> None:
    x, weight = tokens_and_weight(tokens, 256, 1152, WEIGHTS[name])
    found = product(triton_small_m, x, weight, config.small_m(1152, gated=False))
    assert relative_error(found, exact(x, weight)) < 1e-6
    both = gated_product(triton_small_m, x, weight, config.small_m(1152, gated=True))
    assert relative_error(both, gating(exact(x, weight))) < GATED


@pytest.mark.parametrize("tokens", [33, 64])
@pytest.mark.parametrize("out", [384, 640, 1152, 128])
@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-zeros"])
def test_programs_with_equally_many_k_steps(name: str, out: int, tokens: int) -> None:
    """Four programs for tiles of 192 rows and 8 k-steps: two tiles, of which each has a half; four,
    one for each, of which the last is not whole; six, so that each has one and a half; one tile for
    all."""
    x, weight = tokens_and_weight(tokens, out, 1024, WEIGHTS[name])
    target = gpu(90, multiprocessors=4)
    call = config.Call.of(weight, tokens, gated=True, target=target)
    assert call is not None
    chosen = config.stream_k(call)
    both = gated_product(triton_stream_k, x, weight, chosen, target=target)
    assert relative_error(both, gating(exact(as_read(x, chosen), weight))) < GATED


@pytest.mark.parametrize("tokens", [17, 64])
def test_the_output_matrix(tokens: int) -> None:
    """Two programs take four blocks of rows, of which the last is not whole."""
    x, weight = tokens_and_weight(tokens, 1408, 512, weights.quantize_int8)
    tall = config.Config(
        method="large_n", rows=384, tokens=32 if tokens <= 32 else 64, num_stages=3
    )
    found = product(triton_large_n, x, weight, tall, gpu(90, multiprocessors=2))
    assert relative_error(found, exact(x, weight)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_weights_in_bfloat16(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, 1024)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((256, 1024)) / 32, jnp.bfloat16)
    expected: Any = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    split = dense.Config(rows=64, depth=128, splits=2)
    found = dense_streaming.linear(x, weight, split, target=HOPPER).sum(0)
    assert relative_error(found, expected) < 1e-6
    both = dense_streaming.gated_linear(x, weight, split, target=HOPPER)
    assert relative_error(both, gating(expected)) < GATED
