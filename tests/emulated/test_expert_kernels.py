"""The kernels of a mixture of experts on the emulator, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    experts,
    route,
    triton_streaming,
)
from jaxserve_kernels.experts import triton as kernels
from jaxserve_kernels.experts.config import Config, Launch, choose, choose_streaming
from jaxserve_kernels.experts.triton_route import order
from jaxserve_kernels.matmul import linear
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulated.weights import WEIGHTS
from tests.emulator.targets import HOPPER, PDL

EXPERTS, K, EMBED, WIDTH = 6, 2, 256, 128


def plain(weight: Any) -> Any:
    return weight.astype(jnp.bfloat16)


QUANTIZE: dict[str, Callable[[Any], Any]] = {"bf16": plain, **WEIGHTS}


def made(
    tokens: int,
    quantize: Callable[[Any], Any] = plain,
    *,
    biases: bool = False,
    embed: int = EMBED,
    width: int = WIDTH,
) -> tuple[Any, Any, Any, ExpertWeights]:
    """x, ids, weights and experts; the last expert gets no token."""
    rng = np.random.default_rng(tokens)

    def weight(out: int, depth: int) -> Any:
        values = jnp.asarray(rng.standard_normal((EXPERTS, out, depth)) * depth**-0.5, jnp.float32)
        padded = 0 if quantize is plain else -depth % 128
        return quantize(jnp.pad(values, ((0, 0), (0, 0), (0, padded))))

    def bias(size: int) -> Any:
        return jnp.asarray(rng.standard_normal((EXPERTS, size)), jnp.bfloat16) if biases else None

    x = jnp.asarray(rng.standard_normal((tokens, embed)), jnp.bfloat16)
    ids = np.stack([rng.permutation(EXPERTS - 1)[:K] for _ in range(tokens)])
    weights = rng.uniform(0.1, 1.0, (tokens, K))
    w = ExpertWeights(weight(2 * width, embed), weight(embed, width), bias(2 * width), bias(embed))
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32), w


def expected(x: Any, ids: Any, weights: Any, w: Any, activation: ExpertActivation = "silu") -> Any:
    """In float32, with x and hidden rounded as in bfloat16: the definition's one part."""
    found = experts(x, ids, weights, w, activation=activation, target=REFERENCE)
    return np.asarray(found[0], np.float32)


def summed(parts: jax.Array) -> Any:
    return np.asarray(parts, np.float32).sum(0)


@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize("tokens", [1, 5])
def test_each_format_of_weights(name: str, tokens: int) -> None:
    args = made(tokens, QUANTIZE[name])
    found = summed(experts(*args, target=HOPPER))
    assert relative_error(found, expected(*args)) < 4e-3


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oss"])
def test_biases_and_activations(activation: ExpertActivation) -> None:
    x, ids, weights, w = made(5, biases=True)
    args = 4 * x, ids, weights, w  # past swiglu_oss's limit
    found = summed(experts(*args, activation=activation, target=HOPPER))
    assert relative_error(found, expected(*args, activation)) < 4e-3


@pytest.mark.parametrize("launch", [
    Launch(tokens=16), Launch(tokens=32, rows=32, depth=64), Launch(tokens=16, rows=128)
], ids=str)  # fmt: skip
def test_tiles_of_tokens(launch: Launch) -> None:
    """More tokens of an expert than a tile has, tiles of few, and rows past the last."""
    args = made(50, embed=192)
    launch = replace(launch, depth=64)
    config = Config(gate_up=launch, down=launch, parts=True)
    found = summed(kernels.experts(*args, "silu", config, target=HOPPER))
    assert relative_error(found, expected(*args)) < 4e-3


def test_many_tokens_give_one_part() -> None:
    args = made(40)
    launch = Launch(tokens=32)
    config = Config(gate_up=launch, down=launch, parts=False)
    found = kernels.experts(*args, "silu", config, target=HOPPER)
    assert found.shape == (1, 40, EMBED) and found.dtype == jnp.bfloat16
    assert relative_error(summed(found), expected(*args)) < 6e-3


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4", "mxfp4"])
def test_weights_with_more_inputs_than_tokens(name: str) -> None:
    """Of a token nothing is read past its end: the emulator fails on what lies past the last."""
    args = made(5, QUANTIZE[name], embed=192, width=96)
    assert (args[3].gate_up.shape[-1], args[3].down.shape[-1]) == (256, 128)
    found = summed(experts(*args, target=HOPPER))
    assert relative_error(found, expected(*args)) < 4e-3


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_chain_of_early_kernels(tokens: int) -> None:
    """Each waits for what it reads: the emulator says so."""
    args = made(tokens)
    found = summed(experts(*args, target=PDL))
    assert relative_error(found, expected(*args)) < 4e-3


@pytest.mark.parametrize("name", ["bf16", "int4", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("rows", [64, 128])
def test_codes_are_asked_for_before_they_are_needed(name: str, rows: int) -> None:
    """Also those that lie in a last tile that is not whole; lists are read early where they are
    there, or the emulator says so."""
    args = made(9, QUANTIZE[name], embed=320, width=192)
    launch = Launch(rows=rows, depth=128 if name in ("int4", "fp8", "mxfp4") else 64, ahead=4)
    for guessing in (launch, replace(launch, ahead=0)):
        config = Config(gate_up=guessing, down=launch, parts=True)
        found = summed(kernels.experts(*args, "silu", config, target=PDL))
        assert relative_error(found, expected(*args)) < 4e-3


CODES = [name for name in QUANTIZE if name.startswith(("int4", "mxfp4", "fp8"))]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("launch", [
    Launch(rows=128, tokens=8, depth=256, num_stages=3),
    Launch(rows=128, tokens=16, depth=128, num_stages=2, ahead=4),
], ids=str)  # fmt: skip
def test_streamed_codes(name: str, launch: Launch) -> None:
    """Experts with several tiles of tokens and without any, rows past the last one, and an odd
    number of tiles of inputs."""
    embed = 320 if name in ("int4", "mxfp4") else 384  # 320: tokens have fewer inputs
    args = made(25, QUANTIZE[name], embed=embed, width=128)
    assert args[3].gate_up.shape[-1] == 384
    config = Config(gate_up=launch, down=launch, parts=True)
    found = summed(triton_streaming.experts(*args, "silu", config, target=PDL))
    assert relative_error(found, expected(*args)) < 4e-3


@pytest.mark.parametrize("name", ["int4", "int4-zeros", "mxfp4"])
@pytest.mark.parametrize("depth", [128, 256])
def test_streamed_codes_by_warpgroups(name: str, depth: int) -> None:
    args = made(60, QUANTIZE[name], embed=384, width=128)
    launch = Launch(rows=128, tokens=32, depth=depth, num_stages=3)
    config = Config(gate_up=launch, down=launch, parts=True)
    found = summed(triton_streaming.experts(*args, "silu", config, target=PDL))
    assert relative_error(found, expected(*args)) < 4e-3


def test_streamed_codes_take_launches_of_a_table() -> None:
    x, ids, _, w = made(9, QUANTIZE["mxfp4"])
    launch = Launch(rows=128, tokens=16, depth=128, num_stages=2)
    shape = ("streaming_down", "mxfp4", *w.down.shape)
    tuned = HOPPER.with_tuned({("experts", shape): asdict(launch)})
    rule, found = (choose_streaming(x, ids, w, target=each) for each in (HOPPER, tuned))
    assert isinstance(rule, Config) and rule.down != launch
    assert found == replace(rule, down=launch)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_oss"])
def test_streamed_codes_with_biases_and_activations(activation: ExpertActivation) -> None:
    x, ids, weights, w = made(9, QUANTIZE["mxfp4"], biases=True, width=192)
    args = 4 * x, ids, weights, w  # past swiglu_oss's limit
    seen: list[Any] = []
    observed = HOPPER.replace(observe=seen.append)
    found = summed(experts(*args, activation=activation, target=observed))
    assert seen[0].implementation.name == "triton_streaming"
    assert relative_error(found, expected(*args, activation)) < 4e-3


@pytest.mark.parametrize("count", [EXPERTS, 32])
def test_order(count: int) -> None:
    ids = np.random.default_rng(0).integers(0, count, (700, K), np.int32)
    placed, ends = order(jnp.asarray(ids), count, target=HOPPER)
    np.testing.assert_array_equal(placed, np.argsort(ids.ravel(), kind="stable"))
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(ids.ravel(), minlength=count)))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("parts", [0, 3])
def test_route(scoring: Any, normalize: bool, parts: int) -> None:
    routing = Routing(num_experts=24, top_k=3, scoring=scoring, normalize=normalize)
    rng = np.random.default_rng(parts)
    shape = (parts, 7, 64) if parts else (7, 24)  # 64: rows of a router's matrix after the last
    logits = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    if not parts:
        logits = logits.at[0, 5].set(logits[0].max()).at[0, 9].set(logits[0].max())  # equals
    bias = jnp.asarray(rng.standard_normal(24), jnp.bfloat16) if parts else None
    ids, weights, _ = route(logits, routing, bias, target=PDL)
    expected_ids, expected_weights, _ = route(logits, routing, bias, target=REFERENCE)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize("target", [HOPPER, PDL], ids=["plain", "early"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9])
@pytest.mark.parametrize(("count", "k"), [(6, 3), (40, 4)])
@pytest.mark.parametrize("padding", [0, 1])
def test_few_tokens_are_routed_and_sorted_at_once(
    count: int, k: int, tokens: int, padding: int, target: Target
) -> None:
    active = (jnp.arange(tokens) < tokens - padding).astype(jnp.int32) if padding else None
    logits = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, count)))
    routing = Routing(num_experts=count, top_k=k)
    given = logits, routing, None, active
    ids, weights, found = route(*given, target=target)
    expected_ids, expected_weights, _ = route(*given, target=REFERENCE)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)
    assert (found is not None) == (1 < tokens <= 8)
    if found is not None:
        expected = order(expected_ids, count, target=HOPPER)
        np.testing.assert_array_equal(found.ends, expected.ends)
        there = int(found.ends[-1])
        assert there == (tokens - padding) * k
        np.testing.assert_array_equal(found.pairs[:there], expected.pairs[:there])


def test_a_token_of_nan_goes_to_experts_that_exist() -> None:
    routing = Routing(num_experts=5, top_k=2)
    ids, *_ = route(jnp.full((2, 5), jnp.nan), routing, target=HOPPER)
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 5))


@pytest.mark.parametrize(("tokens", "k", "count"), [(1, 8, 128), (64, 8, 128), (2048, 8, 128)])
def test_launches_for_real_shapes(tokens: int, k: int, count: int) -> None:
    x: Any = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)
    ids: Any = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    w = ExpertWeights(
        jax.ShapeDtypeStruct((count, 1536, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((count, 2048, 768), jnp.bfloat16),
    )
    config = choose(x, ids, w, target=HOPPER)
    assert isinstance(config, Config)
    assert config.parts == (tokens <= 256)


@pytest.mark.parametrize("target", [HOPPER, PDL], ids=["plain", "early"])
@pytest.mark.parametrize("rows", [128, 32])
def test_dense_products_of_inputs_in_tiles_of_64(rows: int, target: Target) -> None:
    """gpt-oss's 2,880 are no multiple of 128, and its router has 32 rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 192)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((rows, 192)), jnp.bfloat16)
    seen: list[Any] = []
    observed = target.replace(observe=seen.append)
    found = summed(linear(x, weight, jnp.float32, target=observed))
    assert seen[0].implementation.kernels
    assert (
        relative_error(found, np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T) < 1e-6
    )
