"""A candidate's kernels, for few tokens' router and experts, against the definitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    experts,
    route,
)
from jaxserve_kernels.target import REFERENCE
from lab.studies import few_tokens
from tests.emulated.errors import relative_error
from tests.emulated.test_expert_kernels import EMBED, EXPERTS, QUANTIZE, K, made
from tests.emulator.launch import triton_call
from tests.emulator.targets import HOPPER, PDL


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    monkeypatch.setattr(few_tokens, "triton_call", triton_call)


def scores_of(seed: int, columns: int, tokens: int = 1) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, columns)), jnp.float32)


def expected(
    x: Any, scores: Any, routing: Routing, w: ExpertWeights, bias: Any, activation: Any = "silu"
) -> Any:
    ids, weights = route(scores, routing, bias, target=REFERENCE)
    found = experts(x, ids, weights, w, activation=activation, target=REFERENCE)
    return np.asarray(found[0], np.float32)


@pytest.mark.parametrize(("name", "tokens", "target"), [
    ("bf16", 1, PDL), ("bf16", 5, PDL),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("bf16", 1, HOPPER), ("bf16", 11, PDL), ("int4", 1, PDL), ("fp8", 5, PDL),
            ("mxfp4", 1, PDL), ("nvfp4", 5, PDL),
        )
    ),
])  # fmt: skip
def test_each_format_of_weights(name: str, tokens: int, target: Any) -> None:
    x, *_, w = made(tokens, QUANTIZE[name])
    routing, scores = Routing(num_experts=EXPERTS, top_k=K), scores_of(1, EXPERTS, tokens)
    found = few_tokens.experts(x, scores, routing, w, "silu", target=target)
    assert found.shape == (K, tokens, EMBED) and found.dtype == jnp.float32
    error = relative_error(np.asarray(found).sum(0), expected(x, scores, routing, w, None))
    assert error < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oss"])
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_biases_activations_and_inputs_past_the_last(
    name: str, activation: ExpertActivation
) -> None:
    """64 columns of a router, whose last belong to no expert."""
    x, *_, w = made(3, QUANTIZE[name], biases=True, embed=192, width=96 if name == "mxfp4" else 64)
    routing = Routing(num_experts=EXPERTS, top_k=K, scoring="sigmoid", normalize=False)
    scores = scores_of(2, 64, 3).at[:, 40].set(9.0)
    bias = scores_of(3, EXPERTS)[0].astype(jnp.bfloat16)
    args = 4 * x, scores, routing, w
    found = few_tokens.experts(*args, activation, bias=bias, target=PDL)
    error = relative_error(np.asarray(found).sum(0), expected(*args, bias, activation))
    assert error < 4e-3


@pytest.mark.parametrize("routing", [
    Routing(num_experts=48, top_k=5),
    Routing(num_experts=48, top_k=5, normalize=False),
    Routing(num_experts=48, top_k=5, scoring="sigmoid"),
], ids=str)  # fmt: skip
def test_choices(routing: Routing) -> None:
    """By an expert's number: each gives its own, times the weight. Two scores are equal."""
    x = jnp.ones((1, 128), jnp.bfloat16)
    scores = scores_of(4, 48).at[0, 7].set(3.0).at[0, 30].set(3.0).at[0, 3].set(jnp.nan)
    number = jnp.arange(48, dtype=jnp.bfloat16)[:, None, None]
    gate_up = jnp.zeros((48, 128, 128), jnp.bfloat16).at[:, :, 0].set(1.0)
    down = jnp.zeros((48, 64, 64), jnp.bfloat16).at[:, :, 0].set(1.0) * number
    w = ExpertWeights(gate_up, down)
    found = few_tokens.experts(x, scores, routing, w, "silu", target=PDL)
    ids, weights = route(scores.at[0, 3].set(-jnp.inf), routing, target=REFERENCE)
    hidden = float(jax.nn.silu(jnp.float32(1.0)).astype(jnp.bfloat16))
    wanted = np.asarray(ids, np.float32) * np.asarray(weights) * hidden
    np.testing.assert_allclose(found[:, 0, 0], wanted[0], rtol=2e-6)


@pytest.mark.parametrize(("embed", "rows", "tokens"), [(256, 128, 1), (192, 33, 3)])
def test_scores_of_a_normed_token(embed: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, update = normal(tokens, embed), normal(3, tokens, embed, dtype=jnp.float32)
    weight, router, bias = normal(embed), normal(rows, embed), normal(embed)
    total, normed, scores = few_tokens.norm_and_score(
        x, update, weight, 1e-6, router, bias=bias, target=PDL
    )
    own: Any = add_rms_norm(x, update, weight, 1e-6, bias=bias, target=REFERENCE)
    np.testing.assert_array_equal(total, own[0])
    assert relative_error(np.asarray(normed, np.float32), np.asarray(own[1], np.float32)) < 2e-3
    wanted = np.asarray(normed, np.float32) @ np.asarray(router, np.float32).T
    assert relative_error(np.asarray(scores), wanted) < 1e-6
