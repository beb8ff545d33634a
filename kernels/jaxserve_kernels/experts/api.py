"""Mixtures of experts: picks the implementations."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from jaxserve_kernels.experts import reference
from jaxserve_kernels.experts.config import (
    Config,
    choose,
    choose_streaming,
    describe,
    hopper_refuses,
)
from jaxserve_kernels.experts.types import (
    ExpertActivation,
    ExpertWeights,
    Order,
    Routes,
    Routing,
)
from jaxserve_kernels.op import (
    NO_KERNELS,
    NOT_HOPPER,
    Implementation,
    Op,
    Refusal,
    anything,
    on_kernels,
)
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, plain
from jaxserve_kernels.target import Target


def route(
    logits: Array,
    routing: Routing,
    bias: Array | None = None,
    active: Array | None = None,
    *,
    target: Target,
) -> Routes:
    """See `reference.route`. The kernel for few tokens also sorts the pairs by expert."""
    return _ROUTE(logits, bias, active, routing=routing, target=target)


def experts(
    x: Array | BothForms,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    order: Order | None = None,
    *,
    activation: ExpertActivation = "silu",
    target: Target,
) -> Array:
    """See `reference.experts`: partial sums [parts, tokens, embed], like those of `matmul.linear`.

    There is one part, or one for each of a token's k experts. The k parts are float32 for few
    tokens, and in x's dtype for many.

    Args:
      x: with an 8-bit form only in the `config.token_format` of this call.
      order: that of `route`, if it has one.
    """
    return _EXPERTS(x, ids, weights, w, order, activation=activation, target=target)


def _kernel_routes(_: None, *args: Any, **options: Any) -> Routes:
    from jaxserve_kernels.experts import triton_route  # needs Triton: only for GPUs

    return triton_route.route(*args, **options)


def _definition_routes(
    _: None,
    logits: Array,
    bias: Array | None,
    active: Array | None,
    *,
    routing: Routing,
    target: Target,
) -> Routes:
    bias = bias if bias is None else bias[: routing.num_experts]
    return Routes(*reference.route(logits, routing, bias, active), None)


def _configure(
    x: Array, ids: Array, _weights: Array, w: ExpertWeights, *_: Any, target: Target, **__: Any
) -> Config | Refusal:
    if not target.uses_triton():
        return NO_KERNELS
    return choose(x, ids, w, target=target)


def _kernels(config: Config, *args: Any, **options: Any) -> Array:
    from jaxserve_kernels.experts import triton  # needs Triton: only for GPUs

    x, *own, order = args
    return triton.experts(plain(x), *own, order=order, config=config, **options)


def configure_streaming(
    x: Array | BothForms, ids: Array | jax.ShapeDtypeStruct, w: ExpertWeights, *, target: Target
) -> Config | Refusal:
    """See `config.choose_streaming`."""
    if not target.uses_triton():
        return NO_KERNELS
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    return choose_streaming(x, ids, w, target=target)


def _configure_streaming(
    x: Array | BothForms,
    ids: Array,
    _weights: Array,
    w: ExpertWeights,
    *_: Any,
    target: Target,
    **__: Any,
) -> Config | Refusal:
    return configure_streaming(x, ids, w, target=target)


def _streaming(config: Config, *args: Any, **options: Any) -> Array:
    from jaxserve_kernels.experts import triton_streaming  # needs Triton: only for GPUs

    x, *own, order = args
    return triton_streaming.experts(x, *own, order=order, config=config, **options)


def _configure_hopper(
    x: Array, ids: Array, _weights: Array, w: ExpertWeights, *_: Any, target: Target, **__: Any
) -> Refusal | None:
    if not target.uses_triton():
        return NO_KERNELS
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    return hopper_refuses(x, ids, w, target=target)


def _hopper(_: None, *args: Any, **options: Any) -> Array:
    from jaxserve_kernels.experts import hopper  # needs Triton: only for GPUs

    *own, order = args
    return hopper.experts(*own, order=order, **options)


def _definition(
    _: None,
    x: Array | BothForms,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    _order: Order | None,
    *,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    return reference.experts(plain(x), ids, weights, w, activation)


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
        Implementation(
            name="triton_streaming",
            configure=_configure_streaming,
            run=_streaming,
            label="experts_streaming",
        ),
        Implementation(name="triton", configure=_configure, run=_kernels),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=describe,
)
