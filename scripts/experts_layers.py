"""Layers of experts and of dense products as large, with random weights, and their definition."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from random_weights import QUANTIZE

from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import add_rms_norm, add_rms_norm_twice
from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    experts,
    route,
    token_format,
)
from jaxserve_kernels.matmul import BothForms, gated_linear, linear, plain
from jaxserve_kernels.target import REFERENCE, Target

LAYERS = 2
"""Each has its own weights; together they are larger than any cache."""

EPS = 1e-6

FORMATS = {name: QUANTIZE[name] for name in ("bf16", "int4", "fp8", "fp8-blocks", "mxfp4")}


class Model(NamedTuple):
    experts: int
    top_k: int
    embed: int
    width: int
    activation: ExpertActivation = "silu"
    biases: bool = False

    @property
    def routing(self) -> Routing:
        return Routing(num_experts=self.experts, top_k=self.top_k)


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "qwen3.5-35b-a3b": Model(256, 8, 2048, 512),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, "swiglu_oss", biases=True),
}


def make_weights(sizes: Model, name: str) -> ExpertWeights:
    """Returns weights [layers, experts, ...]. Inputs of quantised weights are padded to tiles."""

    def one(seed: int, out: int, depth: int) -> Any:
        @jax.jit
        def made() -> Any:
            shape = (sizes.experts, out, depth)
            noise = jax.random.uniform(jax.random.key(seed), shape, jnp.bfloat16, -1, 1)
            padded = 0 if name == "bf16" else -depth % 128
            return FORMATS[name](jnp.pad(noise * depth**-0.5, ((0, 0), (0, 0), (0, padded))))

        return made()

    def layers(out: int, depth: int) -> Any:
        each = [one(seed, out, depth) for seed in range(LAYERS)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def bias(size: int) -> Any:
        shape = (LAYERS, sizes.experts, size)
        return jnp.full(shape, 0.01, jnp.bfloat16) if sizes.biases else None

    gate_up, down = layers(2 * sizes.width, sizes.embed), layers(sizes.embed, sizes.width)
    return ExpertWeights(gate_up, down, bias(2 * sizes.width), bias(sizes.embed))


def sparse_layers(
    x: Any, logits: Any, norm: Any, w: ExpertWeights, sizes: Model, *, target: Target
) -> Any:
    first: Any = jax.tree.map(lambda leaf: leaf[0], w)
    form = token_format(x, sizes.top_k, first, target=target)
    normed: Any = as_read(x, sizes.top_k, first, target=target)
    for index in range(logits.shape[0]):
        layer: Any = jax.tree.map(lambda leaf: leaf[index % LAYERS], w)  # noqa: B023
        ids, weight, order = route(logits[index], sizes.routing, target=target)
        own = normed, ids, weight, layer, order
        parts = experts(*own, activation=sizes.activation, target=target)
        both: Any = add_rms_norm_twice(x, parts, norm, EPS, form, target=target)
        x, normed = both
    return x, plain(normed)


def as_read(x: Any, top_k: int, w: ExpertWeights, *, target: Target) -> Any:
    """Returns x in the forms in which a norm before the experts would write it."""
    form = token_format(x, top_k, w, target=target)
    if form is None:
        return x
    from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized

    return BothForms(x, quantized(x, form, target=target))


def as_dense(w: ExpertWeights, count: int) -> tuple[Any, Any]:
    """Returns the weights of `count` experts as one dense weight per layer. Its values mean
    nothing."""

    def rows(leaf: Any) -> Any:  # [layers, experts, out tiles, ...]
        return leaf[:, :count].reshape(LAYERS, -1, *leaf.shape[3:])

    def columns(leaf: Any) -> Any:  # [layers, experts, out tiles, in tiles, ...]
        if leaf.ndim == 5 and leaf.shape[3] == 1:  # a scale per row
            return leaf[:, 0]
        return leaf[:, :count].reshape(LAYERS, leaf.shape[2], -1, *leaf.shape[4:])

    gate_up: Any = jax.tree.map(rows, w.gate_up)
    down: Any = jax.tree.map(columns, w.down)
    return gate_up, down


def dense_layers(x: Any, logits: Any, norm: Any, w: Any, _: Model, *, target: Target) -> Any:
    normed = x
    for index in range(logits.shape[0]):
        gate_up, down = jax.tree.map(lambda leaf: leaf[index % LAYERS], w)  # noqa: B023
        hidden = gated_linear(normed, gate_up, target=target)
        parts = linear(hidden, down, target=target)
        x, normed = add_rms_norm(x, parts, norm, EPS, target=target)
    return x, normed


def relative_error(
    x: Any, logits: Any, w: ExpertWeights, routing: Routing, activation: ExpertActivation, *,
    chain: bool, target: Target,
) -> float:  # fmt: skip
    """Of the norm of the experts' sums, for x [tokens, embed] and logits [tokens, experts]. chain:
    in a chain of early launches, which computes nothing outside of kernels."""
    layer = partial(_layer, routing=routing, activation=activation)

    def launch(*args: Any) -> Any:
        return pdl.call(layer, *args, target=target) if chain else layer(*args, target=target)

    found = _sum(jax.jit(launch)(x, logits, w))
    expected = _definition(x, logits, w, routing, activation)
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


@partial(jax.jit, static_argnums=(3, 4))
def _definition(
    x: Any, logits: Any, w: ExpertWeights, routing: Routing, activation: ExpertActivation
) -> Any:
    return _sum(_layer(x, logits, w, routing=routing, activation=activation, target=REFERENCE))


def _layer(
    x: Any, logits: Any, w: ExpertWeights, *,
    routing: Routing, activation: ExpertActivation, target: Target,
) -> Any:  # fmt: skip
    """A token's experts, [parts, tokens, embed]."""
    ids, weights, order = route(logits, routing, target=target)
    read = as_read(x, routing.top_k, w, target=target)
    return experts(read, ids, weights, w, order, activation=activation, target=target)


@jax.jit
def _sum(parts: Any) -> Any:
    return parts.astype(jnp.float32).sum(0)
