"""Mixtures of experts: picks the implementations."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.experts import reference
from jaxserve_kernels.experts.config import (
    Config,
    HopperLaunch,
    choose,
    describe,
    hopper_launch,
    hopper_refuses,
)
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Lists, Routing
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
) -> tuple[Array, Array, Lists | None]:
    """See `reference.route`; and lists for `experts`, where the kernel that routes makes them."""
    return _ROUTE(logits, bias, routing=routing, target=target)


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    lists: Lists | None = None,
    target: Target,
) -> Array:
    """See `reference.experts`: partial sums [parts, tokens, embed], as of `matmul.linear`.

    Of few tokens each choice of a token's is a part, in float32.
    """
    return _EXPERTS(x, ids, weights, w, lists, activation=activation, target=target)


def _kernel_routes(
    _: None, logits: Array, bias: Array | None, *, routing: Routing, target: Target
) -> tuple[Array, Array, Lists | None]:
    from jaxserve_kernels.experts import triton_route  # needs Triton: only for GPUs

    return triton_route.route(logits, routing, bias, target=target)


def _definition_routes(
    _: None, logits: Array, bias: Array | None, *, routing: Routing, target: Target
) -> tuple[Array, Array, None]:
    return *reference.route(logits, routing, bias), None


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
    lists: Lists | None,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    from jaxserve_kernels.experts import triton  # needs Triton: only for GPUs

    return triton.experts(x, ids, weights, w, activation, config, lists, target=target)


def _configure_hopper(
    x: Array, ids: Array, _weights: Array, w: ExpertWeights, *_: Any, target: Target, **__: Any
) -> HopperLaunch | Refusal:
    if not target.uses_triton():
        return NO_KERNELS
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    refused = hopper_refuses(x, ids, w, target=target)
    return hopper_launch(w, x.shape[0], target=target) if refused is None else refused


def _hopper(
    launch: HopperLaunch,
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    lists: Lists | None,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    from jaxserve_kernels.experts import hopper  # needs Triton: only for GPUs

    return hopper.experts(x, ids, weights, w, activation, launch, target=target)


def _definition(
    _: None,
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    lists: Lists | None,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    return reference.experts(x, ids, weights, w, activation)


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
