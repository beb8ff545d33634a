"""Routers and experts: the definition against formulas in numpy, and on a GPU the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import pdl, weights
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    experts,
    norm_and_score,
    route,
    routed_experts,
    token_format,
)
from jaxserve_kernels.matmul import BothForms
from jaxserve_kernels.tables import LIMITS
from jaxserve_kernels.target import CPU, REFERENCE, Target

type Floats = np.ndarray[Any, np.dtype[np.float64]]


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def routed(logits: Floats, k: int, scoring: str, *, normalize: bool) -> tuple[Any, Any]:
    """One token after the other."""
    ids, values = [], []
    for row in logits:
        scores = sigmoid(row) if scoring == "sigmoid" else np.exp(row) / np.exp(row).sum()
        best = sorted(range(len(row)), key=lambda each: -scores[each])[:k]
        ids.append(best)
        values.append(scores[best] / (scores[best].sum() if normalize else 1.0))
    return np.array(ids), np.array(values)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_route(scoring: Any, normalize: bool) -> None:
    rng = np.random.default_rng(0)
    parts, bias = rng.standard_normal((3, 9, 12)), rng.standard_normal(12)
    routing = Routing(num_experts=12, top_k=4, scoring=scoring, normalize=normalize)
    beyond = jnp.pad(jnp.asarray(parts), ((0, 0), (0, 0), (0, 4)), constant_values=9.0)
    ids, values, _ = route(beyond, routing, jnp.asarray(bias), target=CPU)
    expected = routed(parts.sum(0) + bias, 4, scoring, normalize=normalize)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(values, expected[1], rtol=1e-5)
    assert ids.dtype == jnp.int32 and values.dtype == jnp.float32


def test_padding_has_no_experts() -> None:
    x, *_, w = made(5, (4, 2, 24, 16))
    logits = jax.random.normal(jax.random.key(5), (5, 4))
    routing, active = Routing(num_experts=4, top_k=2), jnp.asarray([1, 0, 1, 1, 0])
    found, shares, _ = route(logits, routing, None, active, target=CPU)
    expected, wanted, _ = route(logits, routing, target=CPU)
    real = np.flatnonzero(active)
    np.testing.assert_array_equal(found[real], expected[real])
    np.testing.assert_array_equal(shares[real], wanted[real])
    assert np.all(np.delete(found, real, 0) == 4) and np.all(np.delete(shares, real, 0) == 0.0)
    out = experts(x, found, shares, w, target=CPU)
    assert np.all(np.delete(out[0], real, 0) == 0.0)


def test_gpt_oss_takes_the_softmax_of_the_chosen_logits() -> None:
    logits = np.random.default_rng(1).standard_normal((5, 8))
    ids, values, _ = route(jnp.asarray(logits), Routing(num_experts=8, top_k=3), target=CPU)
    chosen = np.exp(np.take_along_axis(logits, np.asarray(ids), axis=1))
    np.testing.assert_allclose(values, chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def gating(gate: Floats, up: Floats, activation: str) -> Floats:
    if activation == "silu":
        return gate * sigmoid(gate) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def mixed(x: Floats, ids: Any, values: Any, w: ExpertWeights, activation: str) -> Floats:
    """One pair of a token and an expert after the other."""
    plain = [None if each is None else np.asarray(each, np.float64) for each in w]
    gate_up, down, gate_up_bias, down_bias = plain
    assert gate_up is not None and down is not None
    out = np.zeros_like(x)
    for token, (chosen, factors) in enumerate(zip(ids, values, strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            both = gate_up[expert] @ x[token]
            both += 0.0 if gate_up_bias is None else gate_up_bias[expert]
            hidden = gating(both[: len(both) // 2], both[len(both) // 2 :], activation)
            result = down[expert] @ hidden
            out[token] += factor * (result + (0.0 if down_bias is None else down_bias[expert]))
    return out


def made(
    tokens: int,
    sizes: tuple[int, int, int, int],
    quantize: Callable[[Any], Any] = lambda weight: weight,
    *,
    biases: bool = False,
    dtype: Any = jnp.float32,
) -> tuple[Any, Any, Any, ExpertWeights]:
    """sizes: experts, those of a token, embed, width."""
    count, k, embed, width = sizes
    keys = iter(jax.random.split(jax.random.key(tokens), 8))

    def weight(out: int, depth: int) -> Any:
        return quantize(jax.random.normal(next(keys), (count, out, depth)) * depth**-0.5)

    def bias(size: int) -> Any:
        return jax.random.normal(next(keys), (count, size)).astype(dtype) if biases else None

    w = ExpertWeights(weight(2 * width, embed), weight(embed, width), bias(2 * width), bias(embed))
    x = jax.random.normal(next(keys), (tokens, embed)).astype(dtype)
    logits = jax.random.normal(next(keys), (tokens, count))
    ids, values, _ = route(logits, Routing(num_experts=count, top_k=k), target=REFERENCE)
    return x, ids, values, w


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oss"])
@pytest.mark.parametrize("biases", [False, True])
def test_the_definition(activation: ExpertActivation, biases: bool) -> None:
    x, ids, values, w = made(7, (5, 2, 24, 16), biases=biases)
    x *= 5  # past the limit
    found = experts(x, ids, values, w, activation=activation, target=CPU)
    expected = mixed(np.asarray(x, np.float64), np.asarray(ids), np.asarray(values), w, activation)
    assert found.shape == (1, 7, 24)
    np.testing.assert_allclose(found[0], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "quantize",
    [weights.quantize_int4, weights.quantize_fp8, weights.quantize_int8, weights.quantize_mxfp4],
)
def test_quantised_weights_are_what_their_codes_mean(quantize: Any) -> None:
    x, ids, values, w = made(3, (4, 2, 128, 128), quantize)
    meant = ExpertWeights(w.gate_up.dequantize(), w.down.dequantize())
    found = experts(x, ids, values, w, target=CPU)
    expected = mixed(np.asarray(x, np.float64), np.asarray(ids), np.asarray(values), meant, "silu")
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


def test_inputs_beyond_those_of_a_token_do_not_count() -> None:
    """As gpt-oss's 2,880 are stored as 2,944."""
    x, ids, values, w = made(3, (4, 2, 64, 96))
    wide = [jnp.pad(each, ((0, 0), (0, 0), (0, -each.shape[2] % 128))) for each in w[:2]]
    beyond = [each.at[..., -1].set(1.0) for each in wide]
    gate_up, down = map(weights.quantize_int4, beyond)
    codes = ExpertWeights(gate_up, down)
    assert codes.gate_up.shape == (4, 192, 128) and codes.down.shape == (4, 64, 128)
    meant = ExpertWeights(codes.gate_up.dequantize()[..., :64], codes.down.dequantize()[..., :96])
    found = experts(x, ids, values, codes, target=CPU)
    expected = experts(x, ids, values, meant, target=CPU)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


FORMATS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda weight: weight.astype(jnp.bfloat16),
    "int4": weights.quantize_int4,
    "fp8": weights.quantize_fp8,
    "fp8-blocks": partial(weights.quantize_fp8, group=128),
    "mxfp4": weights.quantize_mxfp4,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 600])
@pytest.mark.parametrize("early", [False, True])
def test_kernels_are_the_definition(name: str, tokens: int, early: bool) -> None:
    """Rounding of hidden to bfloat16 where sums differ in their last bits: 4e-3 at most. Many
    tokens of quantised weights are rounded to e4m3; of MXFP4 also 16 for each expert, outside of a
    chain. With 300 and 600 an expert's tiles have about 75 and 150. Products of 9 and of 6 steps
    are loops with and without a rest."""
    sizes = (16, 4, 1152, 768)
    args = made(tokens, sizes, FORMATS[name], biases=True, dtype=jnp.bfloat16)

    def call(*args: Any, target: Target) -> Any:
        return experts(*args, activation="swiglu_oss", target=target)

    def launch(*args: Any) -> Any:
        target = Target.here()
        return pdl.call(call, *args, target=target) if early else call(*args, target=target)

    found = np.asarray(jax.jit(launch)(*args), np.float64).sum(0)
    reference = jax.jit(lambda *args: call(*args, target=REFERENCE))(*args)
    expected = np.asarray(reference, np.float64)[0]
    many = tokens >= (64 if name == "mxfp4" and not early else 300)
    most = 5e-2 if many and name != "bf16" else 6e-3
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [100, 600])
def test_a_joined_chain_computes_the_same_bits(name: str, tokens: int) -> None:
    """Norms, kernels with and without TMA, and an operation of XLA between two layers."""
    args = made(tokens, (16, 4, 1152, 768), FORMATS[name], biases=False, dtype=jnp.bfloat16)

    def layers(x: Any, *rest: Any, target: Target) -> Any:
        weight, update = jnp.ones(x.shape[1], x.dtype), None
        for _ in range(3):
            x, normed = add_rms_norm(x, update, weight, 1e-6, target=target)
            parts = experts(normed, *rest, target=target)
            update = parts * jnp.asarray(2, parts.dtype)
        return x, update

    def run(launch: Any) -> list[np.ndarray]:
        found = jax.jit(lambda *args: launch(layers, *args, target=Target.here()))(*args)
        return [np.asarray(each, np.float32) for each in found]

    alone = run(lambda function, *args, target: function(*args, target=target))
    for joined, each in zip(run(pdl.join), alone, strict=True):
        np.testing.assert_array_equal(joined, each)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "mxfp4", "fp8"])
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_shared_expert_streams_with_the_others(name: str, tokens: int) -> None:
    routed_experts_equal_the_definition(name, tokens, shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_few_tokens_in_a_chain(name: str, tokens: int, shared: bool) -> None:
    """With and without an expert that all have."""
    routed_experts_equal_the_definition(name, tokens, shared=shared)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tokens"), [
    ("int4", 5), ("mxfp4", 5), ("fp8", 20), ("bf16", 9), ("bf16", 1600), ("int4", 1600),
])  # fmt: skip
def test_padding_changes_no_other_token(name: str, tokens: int) -> None:
    """In a chain, and by the kernel for many tokens, which rounds those of int4 weights to e4m3;
    padding's inputs are no numbers."""
    x, *_, w = made(tokens, (16, 4, 384, 256), FORMATS[name], dtype=jnp.bfloat16)
    scores = jax.random.normal(jax.random.key(2), (1, tokens, 16))
    used = tokens * 3 // 5
    active = (jnp.arange(tokens) < used).astype(jnp.int32)

    def call(x: Any, scores: Any, w: Any, active: Any, *, target: Target) -> Any:
        routing = Routing(num_experts=16, top_k=4)
        return routed_experts(x, scores, routing, w, active=active, target=target)

    def launch(*args: Any) -> Any:
        target = Target.here()
        return call(*args, target=target) if tokens > 64 else pdl.call(call, *args, target=target)

    found = jax.jit(launch)(x.at[used:].set(jnp.nan), scores, w, active)
    alone = x[:used], scores[:, :used], w, None
    expected = np.asarray(call(*alone, target=REFERENCE)[0], np.float64)
    difference = np.linalg.norm(np.asarray(found[:, :used], np.float64).sum(0) - expected)
    most = 5e-2 if tokens > 64 and name != "bf16" else 8e-3
    assert difference < most * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("embed", "rows"), [(2048, 257), (2880, 32)])
def test_the_norm_and_the_scores_of_few_tokens(tokens: int, embed: int, rows: int) -> None:
    keys = iter(jax.random.split(jax.random.key(tokens), 4))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.random.normal(next(keys), shape).astype(dtype)

    x, update = normal(tokens, embed), normal(5, tokens, embed, dtype=jnp.float32)
    given = x, update, normal(embed), normal(rows, embed)

    def call(x: Any, update: Any, weight: Any, router: Any, *, target: Target) -> Any:
        return norm_and_score(x, update, weight, 1e-6, router, target=target)

    found = jax.jit(lambda *args: pdl.call(call, *args, target=Target.here()))(*given)
    total, normed, scores = call(*given, target=REFERENCE)
    np.testing.assert_array_equal(found[0], total)
    assert np.linalg.norm(np.asarray(found[1] - normed, np.float64)) < 2e-3 * np.linalg.norm(
        np.asarray(normed, np.float64)
    )
    difference = np.linalg.norm(np.asarray(found[2].sum(0) - scores.sum(0), np.float64))
    assert difference < 4e-3 * np.linalg.norm(np.asarray(scores.sum(0), np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [24, 64])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_experts_read_the_int8_tokens_of_the_norm(
    name: str, tokens: int, shared: bool, early: bool
) -> None:
    """In tiles of 16 and 32 tokens. The definition gets the rounded tokens; hidden is rounded to
    bfloat16 by the kernels only."""
    x, *_, w = made(tokens, (16, 4, 384, 256), FORMATS[name], dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(tokens), 2)
    update = jax.random.normal(keys[0], (3, tokens, 384))
    router = jax.random.normal(keys[1], (17, 384)).astype(jnp.bfloat16) / 20
    one = [jax.tree.map(lambda leaf: leaf[0], each) for each in w[:2]]
    norm = jnp.ones((384,), jnp.bfloat16)
    given = x, update, norm, router, w, ExpertWeights(*one) if shared else None
    routing = Routing(num_experts=16, top_k=4)

    def call(
        x: Any, update: Any, norm: Any, router: Any, w: Any, every: Any, *, target: Target
    ) -> Any:
        form = token_format(x, 4, w, target=target)
        assert form is not None and form.dtype == jnp.int8
        own = x, update, norm, 1e-6, router
        _, normed, scores = norm_and_score(*own, form=form, target=target)
        assert isinstance(normed, BothForms)
        parts = routed_experts(normed, scores, routing, w, shared=every, target=target)
        return normed.plain, scores, parts

    def launch(*args: Any) -> Any:
        limits = {"hopper_tokens_mxfp4": 24}
        target = Target.here().with_tuned({("experts", LIMITS): limits})
        return pdl.call(call, *args, target=target) if early else call(*args, target=target)

    normed, scores, found = jax.jit(launch)(*given)
    groups = normed.astype(jnp.float32).reshape(tokens, -1, 128)
    scale = jnp.abs(groups).max(-1, keepdims=True) / 127
    rounded = (jnp.round(groups / scale) * scale).reshape(normed.shape)
    own = rounded, scores, routing, w
    expected = routed_experts(*own, shared=given[5], target=REFERENCE)
    total = np.asarray(expected[0], np.float64)
    assert found.shape[0] == 4 + shared, "these are other kernels"
    assert np.linalg.norm(np.asarray(found, np.float64).sum(0) - total) < 8e-3 * np.linalg.norm(
        total
    )


def routed_experts_equal_the_definition(name: str, tokens: int, *, shared: bool) -> None:
    """In a chain, by kernels that give a part for each choice, and one for a shared expert."""
    x, _, _, w = made(tokens, (16, 4, 384, 256), FORMATS[name], dtype=jnp.bfloat16)
    scores = jax.random.normal(jax.random.key(1), (1, tokens, 17))
    one = [jax.tree.map(lambda leaf: leaf[0], each) for each in w[:2]]
    given = x, scores, w, ExpertWeights(*one) if shared else None

    def call(x: Any, scores: Any, w: Any, every: Any, *, target: Target) -> Any:
        routing = Routing(num_experts=16, top_k=4)
        return routed_experts(x, scores, routing, w, shared=every, target=target)

    found = jax.jit(lambda *args: pdl.call(call, *args, target=Target.here()))(*given)
    expected = np.asarray(call(*given, target=REFERENCE)[0], np.float64)
    assert found.shape[0] == 4 + shared, "these are other kernels"
    difference = np.linalg.norm(np.asarray(found, np.float64).sum(0) - expected)
    most = 5e-2 if tokens > 64 and name != "bf16" else 8e-3
    assert difference < most * np.linalg.norm(expected)
