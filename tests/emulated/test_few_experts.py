"""Three kernels of few tokens' router and experts, against the operations that they replace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    norm_and_score,
    route,
    routed_experts,
)
from jaxserve_kernels.op import Choice
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulated.test_expert_kernels import EXPERTS, QUANTIZE, K, made
from tests.emulator.targets import HOPPER, PDL

ROUTING = Routing(num_experts=EXPERTS, top_k=K)


def scores_of(seed: int, columns: int, tokens: int = 1) -> Any:
    drawn = np.random.default_rng(seed).standard_normal((1, tokens, columns))
    return jnp.asarray(drawn, jnp.float32)


def observed(target: Target = PDL) -> tuple[list[Choice], Target]:
    seen: list[Choice] = []
    return seen, target.replace(observe=seen.append)


def error(args: tuple[Any, ...], parts: int = K, **options: Any) -> float:
    """Of the kernels, which are what is chosen."""
    seen, target = observed()
    found = routed_experts(*args, **options, target=target)
    assert [each.implementation.name for each in seen] == ["triton"], seen
    assert found.shape == (parts, *args[0].shape) and found.dtype == jnp.float32
    expected = np.asarray(routed_experts(*args, **options, target=REFERENCE)[0], np.float32)
    return relative_error(np.asarray(found).sum(0), expected)


@pytest.mark.parametrize(("name", "tokens"), [
    ("bf16", 1), ("bf16", 2), ("int4", 1), ("int4", 2), ("fp8", 2), ("int8", 1), ("mxfp4", 1),
    ("nvfp4", 2),
])  # fmt: skip
def test_each_format_of_weights(name: str, tokens: int) -> None:
    x, *_, w = made(tokens, QUANTIZE[name])
    assert error((x, scores_of(1, EXPERTS, tokens), ROUTING, w)) < 4e-3


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oss"])
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_biases_activations_and_inputs_past_the_last(
    name: str, activation: ExpertActivation
) -> None:
    """64 columns of a router, whose last belong to no expert."""
    x, *_, w = made(2, QUANTIZE[name], biases=True, embed=192, width=96 if name == "mxfp4" else 64)
    routing = Routing(num_experts=EXPERTS, top_k=K, scoring="sigmoid", normalize=False)
    scores = scores_of(2, 64, 2).at[..., 40].set(9.0)
    bias = scores_of(3, EXPERTS)[0, 0].astype(jnp.bfloat16)
    assert error((4 * x, scores, routing, w), bias=bias, activation=activation) < 4e-3


def shared_of(w: ExpertWeights) -> ExpertWeights:
    """The last expert's weights, which no token has otherwise, as an expert's of all tokens."""
    gate_up, down = (jax.tree.map(lambda leaf: leaf[-1], each) for each in w[:2])
    return ExpertWeights(gate_up, down)


@pytest.mark.parametrize(("name", "tokens"), [
    ("bf16", 2), ("fp8", 1), ("int4", 2),
])  # fmt: skip
def test_a_shared_expert_is_one_choice_more(name: str, tokens: int) -> None:
    """Its score is the one after the experts'."""
    x, *_, w = made(tokens, QUANTIZE[name])
    scores = scores_of(5, EXPERTS + 1, tokens)
    assert error((x, scores, ROUTING, w), K + 1, shared=shared_of(w)) < 6e-3


@pytest.mark.parametrize(("name", "tokens", "parts"), [
    ("fp8", 5, 1), ("int4", 20, 3), ("mxfp4", 3, 1),
])  # fmt: skip
def test_a_shared_expert_of_more_tokens_streams_with_the_others(
    name: str, tokens: int, parts: int
) -> None:
    x, *_, w = made(tokens, QUANTIZE[name])
    scores = jnp.concatenate([scores_of(seed, EXPERTS + 1, tokens) for seed in range(parts)])
    seen, target = observed()
    args = x, scores, ROUTING, w
    found = routed_experts(*args, shared=shared_of(w), target=target)
    assert [each.implementation.name for each in seen] == ["streaming", "triton"]
    assert found.shape == (K + 1, *x.shape) and found.dtype == jnp.float32
    expected = routed_experts(*args, shared=shared_of(w), target=REFERENCE)
    wanted = np.asarray(expected, np.float32).sum(0)
    assert relative_error(np.asarray(found).sum(0), wanted) < 6e-3


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_of_padding_alone(shared: bool) -> None:
    """As graphs are recorded."""
    x, *_, w = made(5, QUANTIZE["int4"])
    options: dict[str, Any] = {"shared": shared_of(w)} if shared else {}
    args = x, scores_of(7, EXPERTS + shared, 5), ROUTING, w
    found = routed_experts(*args, active=jnp.zeros(5, jnp.int32), **options, target=PDL)
    assert found.shape == (K + shared, *x.shape)


@pytest.mark.parametrize(("name", "tokens", "target", "kernels", "shared"), [
    ("int4", 5, PDL, "triton_streaming", False), ("fp8", 20, PDL, "streaming", True),
    ("bf16", 9, PDL, "triton", False), ("bf16", 400, HOPPER, "hopper", False),
])  # fmt: skip
def test_padding_changes_no_other_token(
    name: str, tokens: int, target: Target, kernels: str, shared: bool
) -> None:
    """Its inputs are whatever is in memory, and its scores could choose experts of their own."""
    x, *_, w = made(tokens, QUANTIZE[name])
    scores = scores_of(7, EXPERTS + shared, tokens)
    used = tokens * 3 // 5
    active = (jnp.arange(tokens) < used).astype(jnp.int32)
    options: dict[str, Any] = {"shared": shared_of(w)} if shared else {}
    seen, observing = observed(target)
    args = x.at[used:].set(jnp.nan), scores, ROUTING, w
    found = routed_experts(*args, active=active, **options, target=observing)
    assert kernels in [each.implementation.name for each in seen]
    alone = x[:used], scores[:, :used], ROUTING, w
    expected = routed_experts(*alone, **options, target=REFERENCE)
    both = (np.asarray(each, np.float32).sum(0) for each in (found[:, :used], expected))
    assert relative_error(*both) < 6e-3


@pytest.mark.parametrize("routing", [
    Routing(num_experts=48, top_k=5),
    Routing(num_experts=48, top_k=5, normalize=False),
    Routing(num_experts=48, top_k=5, scoring="sigmoid"),
], ids=str)  # fmt: skip
def test_choices(routing: Routing) -> None:
    """By an expert's number: each gives its own, times the weight. Two scores are equal."""
    x = jnp.ones((1, 128), jnp.bfloat16)
    scores = scores_of(4, 48).at[..., 7].set(3.0).at[..., 30].set(3.0).at[..., 3].set(jnp.nan)
    number = jnp.arange(48, dtype=jnp.bfloat16)[:, None, None]
    gate_up = jnp.zeros((48, 128, 128), jnp.bfloat16).at[:, :, 0].set(1.0)
    down = jnp.zeros((48, 64, 64), jnp.bfloat16).at[:, :, 0].set(1.0) * number
    w = ExpertWeights(gate_up, down)
    found = routed_experts(x, scores, routing, w, target=PDL)
    ids, weights, _ = route(scores.at[..., 3].set(-jnp.inf), routing, target=REFERENCE)
    hidden = float(jax.nn.silu(jnp.float32(1.0)).astype(jnp.bfloat16))
    wanted = np.asarray(ids, np.float32) * np.asarray(weights) * hidden
    np.testing.assert_allclose(found[:, 0, 0], wanted[0], rtol=2e-6)


@pytest.mark.parametrize(
    ("embed", "rows", "tokens"), [(256, 128, 1), (192, 33, 2), (256, 129, 2), (256, 257, 3)]
)
def test_scores_of_a_normed_token(embed: int, rows: int, tokens: int) -> None:
    """The last rows of two cases would be the only ones of a program."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, update = normal(tokens, embed), normal(3, tokens, embed, dtype=jnp.float32)
    args = x, update, normal(embed), 1e-6, normal(rows, embed)
    bias = normal(embed)
    seen, target = observed()
    total, normed, scores = norm_and_score(*args, bias=bias, target=target)
    assert [each.implementation.name for each in seen] == ["triton"]
    wanted = norm_and_score(*args, bias=bias, target=REFERENCE)
    np.testing.assert_array_equal(total, wanted[0])
    assert relative_error(np.asarray(normed, np.float32), np.asarray(wanted[1], np.float32)) < 2e-3
    own = np.asarray(normed, np.float32) @ np.asarray(args[-1], np.float32).T
    assert scores.shape == (1, tokens, rows)
    assert relative_error(np.asarray(scores[0]), own) < 1e-6


def five() -> tuple[Any, ...]:
    x, *_, w = made(5)
    return x, scores_of(1, EXPERTS, 5), ROUTING, w


@pytest.mark.parametrize(("args", "options", "target", "reason"), [
    (five(), {}, PDL, "more than 2 tokens"),
    (five(), {}, PDL.replace(pdl=False), "only with programmatic dependent launch"),
], ids=["tokens", "pdl"])  # fmt: skip
def test_else_they_are_operations_apart(
    args: Any, options: Any, target: Target, reason: str
) -> None:
    seen, target = observed(target)
    routed_experts(*args, **options, target=target)
    assert [each.operation for each in seen] == ["routed_experts", "route", "experts"]
    assert seen[0].refused == (("streaming", "no shared expert"), ("triton", reason))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda x, scores, w, one: (x, jnp.concatenate([scores, scores]), w, None), "scores in parts"),
    (lambda x, scores, w, one: (x.astype(jnp.float32), scores, w, None), "not in bfloat16"),
    (
        lambda x, scores, w, one: (x, scores, w, one._replace(down=one.down[:, :64])),
        "a shared expert unlike the others",
    ),
], ids=["parts", "float32", "shared"])  # fmt: skip
def test_what_the_kernels_refuse(change: Any, reason: str) -> None:
    from jaxserve_kernels.experts.few_config import refuses
    from jaxserve_kernels.op import Refusal

    x, *_, w = made(2)
    given = x, scores_of(1, EXPERTS, 2), w, shared_of(w)
    assert refuses(*given, target=PDL) is None
    assert refuses(*change(*given), target=PDL) == Refusal(reason)
