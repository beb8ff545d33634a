"""Mixtures of experts: picks the implementations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import reference
from jaxserve_kernels.experts.config import (
    Config,
    choose,
    describe,
    few_refuses,
    hopper_refuses,
)
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Mixed, Routing
from jaxserve_kernels.matmul import linear
from jaxserve_kernels.op import (
    NO_KERNELS,
    NOT_HOPPER,
    Implementation,
    Op,
    Refusal,
    anything,
    on_kernels,
)
from jaxserve_kernels.target import Target


def route(
    logits: Array, routing: Routing, bias: Array | None = None, *, target: Target
) -> tuple[Array, Array]:
    """See `reference.route`."""
    return _ROUTE(logits, bias, routing=routing, target=target)


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    target: Target,
) -> Array:
    """See `reference.experts`: partial sums [parts, tokens, embed], as of `matmul.linear`.

    Each choice of a token's may be a part: of few tokens in float32, of many rounded.
    """
    return _EXPERTS(x, ids, weights, w, activation=activation, target=target)


def mixture(
    x: Array,
    update: Array | None,
    norm: Array,
    router: Array,
    w: ExpertWeights,
    *,
    routing: Routing,
    eps: float,
    update_bias: Array | None = None,
    router_bias: Array | None = None,
    activation: ExpertActivation = "silu",
    target: Target,
) -> Mixed:
    """What is between a layer's attention and its end: `add_rms_norm` of x [tokens, embed] and
    `update`, the product with the router [rows, embed], `route`, and `experts`."""
    return _MIXTURE(
        *(x, update, norm, router, w, update_bias, router_bias),
        routing=routing,
        eps=eps,
        activation=activation,
        target=target,
    )


def _kernel_routes(
    _: None, logits: Array, bias: Array | None, *, routing: Routing, target: Target
) -> tuple[Array, Array]:
    from jaxserve_kernels.experts import triton_route  # needs Triton: only for GPUs

    return triton_route.route(logits, routing, bias, target=target)


def _definition_routes(
    _: None, logits: Array, bias: Array | None, *, routing: Routing, target: Target
) -> tuple[Array, Array]:
    return reference.route(logits, routing, bias)


def _configure(
    x: Array, ids: Array, _weights: Array, w: ExpertWeights, *_: Any, target: Target, **__: Any
) -> Config | Refusal:
    if not target.uses_triton():
        return NO_KERNELS
    return choose(x, ids, w, target=target)


def _kernels(
    config: Config,
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    from jaxserve_kernels.experts import triton  # needs Triton: only for GPUs

    return triton.experts(x, ids, weights, w, activation, config, target=target)


def _configure_hopper(
    x: Array, ids: Array, _weights: Array, w: ExpertWeights, *_: Any, target: Target, **__: Any
) -> Refusal | None:
    if not target.uses_triton():
        return NO_KERNELS
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    return hopper_refuses(x, ids, w, target=target)


def _hopper(
    _: None,
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    from jaxserve_kernels.experts import hopper  # needs Triton: only for GPUs

    return hopper.experts(x, ids, weights, w, activation, target=target)


def _definition(
    _: None,
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    return reference.experts(x, ids, weights, w, activation)


def _configure_few(
    x: Array,
    update: Array | None,
    _norm: Array,
    router: Array,
    w: ExpertWeights,
    *_: Any,
    target: Target,
    **__: Any,
) -> Refusal | None:
    if not target.uses_triton():
        return NO_KERNELS
    return few_refuses(x, update, router, w, target=target)


def _few(
    _: None,
    x: Array,
    update: Array,
    norm: Array,
    router: Array,
    w: ExpertWeights,
    update_bias: Array | None,
    router_bias: Array | None,
    *,
    routing: Routing,
    eps: float,
    activation: ExpertActivation,
    target: Target,
) -> Mixed:
    from jaxserve_kernels.experts import triton_few  # needs Triton: only for GPUs

    x, normed, scores = triton_few.norm_and_score(
        x, update, norm, eps, router, bias=update_bias, target=target
    )
    parts = triton_few.experts(
        normed, scores, routing, w, activation, bias=router_bias, target=target
    )
    return Mixed(x, normed, scores.reshape(1, *scores.shape), parts)


def _apart(
    _: None,
    x: Array,
    update: Array | None,
    norm: Array,
    router: Array,
    w: ExpertWeights,
    update_bias: Array | None,
    router_bias: Array | None,
    *,
    routing: Routing,
    eps: float,
    activation: ExpertActivation,
    target: Target,
) -> Mixed:
    both: Any = add_rms_norm(x, update, norm, eps, bias=update_bias, target=target)
    x, normed = both
    scores = linear(normed, router, jnp.float32, target=target)
    ids, weights = route(scores, routing, router_bias, target=target)
    parts = experts(normed, ids, weights, w, activation=activation, target=target)
    return Mixed(x, normed, scores, parts)


_ROUTE = Op(
    name="route",
    implementations=(
        Implementation(name="triton", configure=on_kernels, run=_kernel_routes),
        Implementation(name="reference", configure=anything, run=_definition_routes, kernels=False),
    ),
    describe=lambda logits, *_, **__: f"{logits.shape[-1]} experts",
)
_EXPERTS = Op(
    name="experts",
    implementations=(
        Implementation(
            name="hopper", configure=_configure_hopper, run=_hopper, label="experts_hopper"
        ),
        Implementation(name="triton", configure=_configure, run=_kernels),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=describe,
)
_MIXTURE = Op(
    name="mixture",
    implementations=(
        Implementation(name="triton, few", configure=_configure_few, run=_few),
        Implementation(name="one after the other", configure=anything, run=_apart, kernels=False),
    ),
    describe=lambda x, _update, _norm, _router, w, *_, **__: describe(x, None, None, w),
)
