"""Mixtures of experts of real sizes compile for every card, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve_kernels import pdl, weights
from jaxserve_kernels.experts import ExpertActivation, ExpertWeights, Routing, experts, route
from jaxserve_kernels.op import Choice
from jaxserve_kernels.target import Target

FORMATS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda weight: weight,
    "int4": weights.quantize_int4,
    "fp8": weights.quantize_fp8,
    "mxfp4": weights.quantize_mxfp4,
}
QWEN = (128, 8, 2048, 768)
"""Experts, those of a token, embed, width: of Qwen3-30B-A3B."""
GPT_OSS = (32, 4, 2880, 2880)


def abstract(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def mixture(
    sizes: tuple[int, int, int, int], name: str, *, biases: bool
) -> tuple[Routing, ExpertWeights]:
    count, k, embed, width = sizes

    def weight(out: int, depth: int) -> Any:
        padded = depth if name == "bf16" else depth + -depth % 128
        return jax.eval_shape(FORMATS[name], abstract((count, out, padded)))

    both = [abstract((count, 2 * width)), abstract((count, embed))] if biases else [None, None]
    w = ExpertWeights(weight(2 * width, embed), weight(embed, width), *both)
    return Routing(num_experts=count, top_k=k), w


def layer(activation: ExpertActivation, routing: Routing) -> Callable[..., Any]:
    def call(x: Any, logits: Any, w: ExpertWeights, bias: Any, *, target: Target) -> Any:
        ids, weight, order = route(logits, routing, bias, target=target)
        return experts(x, ids, weight, w, order, activation=activation, target=target)

    return call


def arguments(routing: Routing, w: ExpertWeights, tokens: int) -> tuple[Any, ...]:
    x = abstract((tokens, w.down.shape[1]))
    logits = abstract((2, tokens, routing.num_experts), jnp.float32)
    bias = None if w.gate_up_bias is None else abstract((routing.num_experts,))
    return x, logits, w, bias


def choices(target: Target, sizes: Any, name: str, tokens: int) -> dict[str, Choice]:
    seen: list[Choice] = []
    oss = sizes == GPT_OSS
    routing, w = mixture(sizes, name, biases=oss)
    function = layer("swiglu_oss" if oss else "silu", routing)
    observing = target.replace(observe=seen.append)
    args = arguments(routing, w, tokens)
    jax.jit(lambda *args: function(*args, target=observing)).trace(*args)
    return {choice.operation: choice for choice in seen}


@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_compile_for_every_card(capability: int, name: str, tokens: int) -> None:
    sizes = GPT_OSS if tokens == 64 else QWEN
    found = choices(Target.for_gpu(capability), sizes, name, tokens)
    expected = "triton"
    if (capability, tokens) == (90, 2048):
        expected = "hopper"
    elif (capability, tokens) == (90, 64) and name in ("int4", "mxfp4", "fp8"):
        expected = "triton_streaming"
    assert found["route"].implementation.name == "triton"
    assert found["experts"].implementation.name == expected


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_many_tokens_on_hopper_with_biases_compile(name: str) -> None:
    """Of sizes that are no multiple of a tile's columns."""
    found = choices(Target.for_gpu(90), GPT_OSS, name, 2048)
    assert found["experts"].implementation.name == "hopper"


@pytest.mark.parametrize(("tokens", "expected"), [
    (1, ["route"]), (8, ["route"]), (64, ["route", "order_pairs"]),
])  # fmt: skip
def test_what_comes_before_the_products(tokens: int, expected: list[str]) -> None:
    routing, w = mixture(QWEN, "int4", biases=False)
    function, target = layer("silu", routing), Target.for_gpu(90).replace(pdl=True)
    args = arguments(routing, w, tokens)
    jaxpr = jax.make_jaxpr(lambda *args: function(*args, target=target))(*args).jaxpr
    launches = [each.params["name"] for each in jaxpr.eqns if "metaparams" in each.params]
    assert launches[:-2] == expected, launches


@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_a_layer_of_few_tokens_is_one_chain_of_launches(tokens: int) -> None:
    routing, w = mixture(QWEN, "bf16", biases=False)
    function = layer("silu", routing)
    target = Target.for_gpu(90)
    args = arguments(routing, w, tokens)
    traced = jax.jit(lambda *args: pdl.call(function, *args, target=target)).trace(*args)
    names = [each.primitive.name for each in traced.jaxpr.eqns]
    assert names.count("triton_kernel_call") == 0, names
    assert len(names) == 1, names


@pytest.mark.parametrize(("name", "sizes", "tokens", "asking"), [
    ("int4", QWEN, 8, []), ("int4", QWEN, 16, []), ("int4", QWEN, 64, ["gate_up_streaming"]),
    ("int4", QWEN, 256, ["gate_up", "down"]), ("mxfp4", GPT_OSS, 64, ["gate_up_streaming"]),
    ("fp8", QWEN, 64, ["gate_up_streaming"]), ("bf16", QWEN, 64, []),
])  # fmt: skip
def test_which_kernels_of_a_chain_ask_for_codes_ahead(
    name: str, sizes: tuple[int, int, int, int], tokens: int, asking: list[str]
) -> None:
    """Those of gate and up where their guess is nearly always right, and those of down that do not
    fill their rings early. Of gpt-oss the last tiles of 128 rows are not whole."""
    routing, w = mixture(sizes, name, biases=sizes == GPT_OSS)
    function = layer("swiglu_oss" if sizes == GPT_OSS else "silu", routing)
    args, target = arguments(routing, w, tokens), Target.for_gpu(90)
    traced = jax.jit(lambda *args: pdl.call(function, *args, target=target)).trace(*args)
    (chain,) = traced.jaxpr.eqns
    launches = [
        (each.params["name"], dict(each.params["metaparams"]))
        for each in chain.params["jaxpr"].eqns
        if each.params["name"].startswith("experts_")
    ]
    found = [kernel for kernel, constants in launches if constants["AHEAD"]]
    assert [kernel.split("_", 1)[1].rsplit("_", 1)[0] for kernel in found] == asking, launches
