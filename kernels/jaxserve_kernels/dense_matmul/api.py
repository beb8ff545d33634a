"""Products with unquantised weights: picks the implementation."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve_kernels.activation import Activation
from jaxserve_kernels.dense_matmul import reference
from jaxserve_kernels.dense_matmul.config import (
    Config,
    choose,
    choose_narrow,
    choose_router,
    fused_gating,
    limits_of,
)
from jaxserve_kernels.op import (
    NO_KERNELS,
    NOT_HOPPER,
    NOT_PDL,
    Implementation,
    Op,
    Refusal,
    anything,
)
from jaxserve_kernels.target import Target


def linear(x: Array, weight: Array, dtype: DTypeLike | None = None, *, target: Target) -> Array:
    """See `matmul.linear`."""
    return _LINEAR(x, weight, dtype=jnp.dtype(dtype or x.dtype), target=target)


def add_linear(
    total: Array, x: Array, weight: Array, *, target: Target
) -> tuple[Array, Array | None]:
    """See `matmul.add_linear`."""
    return _ADD_LINEAR(total, x, weight, target=target)


def gated_linear(
    x: Array, weight: Array, activation: Activation = "silu", *, target: Target
) -> Array:
    """See `reference.gated_linear`."""
    return _GATED_LINEAR(x, weight, activation=activation, target=target)


def _unlike(x: Array, target: Target) -> Refusal | None:
    """Why no kernel of this package accepts x; None if they do."""
    if not target.uses_triton():
        return NO_KERNELS
    return None if x.dtype == jnp.bfloat16 else Refusal("not in bfloat16")


def _few_tokens(*, gated: bool, pdl: bool) -> Implementation:
    """The kernel for few tokens. pdl: the kernel copies weights before its inputs exist."""
    name = "triton_streaming" if pdl else "triton"

    def configure(x: Array, weight: Array, *, target: Target, **_: Any) -> Config | Refusal:
        if unlike := _unlike(x, target):
            return unlike
        if target.pdl != pdl:
            return NOT_PDL if pdl else Refusal("not with programmatic dependent launch")
        out, depth = weight.shape
        return choose(gated=gated, tokens=x.shape[0], out=out, depth=depth, target=target)

    def run(
        config: Config, x: Array, weight: Array, *, target: Target, dtype: Any = None, **rest: Any
    ) -> Array:
        kernels = importlib.import_module(f"{__package__}.{name}")  # needs Triton: only for GPUs
        product = kernels.gated_linear if gated else kernels.linear
        return product(x, weight, config, target=target, **rest)

    return Implementation(name=name, configure=configure, run=run)


def _narrow(x: Array, weight: Array, *, target: Target, **_: Any) -> Config | Refusal:
    if unlike := _unlike(x, target):
        return unlike
    if not target.pdl:
        return NOT_PDL
    out, depth = weight.shape
    return choose_narrow(tokens=x.shape[0], out=out, depth=depth, target=target)


def _router(x: Array, weight: Array, *, target: Target, dtype: DTypeLike) -> Config | Refusal:
    if unlike := _unlike(x, target):
        return unlike
    if dtype != jnp.float32:
        return Refusal("not in float32")
    if x.shape[0] <= limits_of(target).most_tokens_pdl:
        return Refusal("few tokens")
    out, depth = weight.shape
    return choose_router(tokens=x.shape[0], out=out, depth=depth, target=target)


def _run_narrow(config: Config, x: Array, weight: Array, *, target: Target, **_: Any) -> Array:
    from jaxserve_kernels.dense_matmul import triton  # needs Triton: only for GPUs

    return triton.linear(x, weight, config, target=target)


def _fused(x: Array, weight: Array, *, target: Target, **_: Any) -> Refusal | None:
    if unlike := _unlike(x, target):
        return unlike
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    out, depth = weight.shape
    return fused_gating(tokens=x.shape[0], out=out, depth=depth, target=target)


def _hopper(_: None, x: Array, weight: Array, *, activation: Activation, target: Target) -> Array:
    from jaxserve_kernels.dense_matmul import hopper  # needs Triton: only for GPUs

    return hopper.gated_linear(x, weight, activation, target=target)


def _adds(total: Array, x: Array, weight: Array, *, target: Target) -> Refusal | None:
    if unlike := _unlike(x, target):
        return unlike
    least = limits_of(target).adding_tokens
    if x.shape[0] < least:
        return Refusal(f"fewer than {least} tokens")
    kernel = _LINEAR.choose(x, weight, dtype=jnp.dtype(x.dtype), target=target).implementation
    return Refusal("a kernel for few tokens applies") if kernel.kernels else None


def _add(_: None, total: Array, x: Array, weight: Array, *, target: Target) -> tuple[Array, None]:
    """XLA passes total to cuBLASLt, which adds it before it rounds the product."""
    return lax.optimization_barrier(total + reference.linear(x, weight, total.dtype)[0]), None


def _apart(
    _: None, total: Array, x: Array, weight: Array, *, target: Target
) -> tuple[Array, Array]:
    return total, linear(x, weight, target=target)


def _define_linear(_: None, x: Array, weight: Array, *, dtype: DTypeLike, target: Target) -> Array:
    return reference.linear(x, weight, dtype)


def _define_gated(
    _: None, x: Array, weight: Array, *, activation: Activation, target: Target
) -> Array:
    return reference.gated_linear(x, weight, activation)


def _sizes(*args: Any, **_: Any) -> str:
    out, depth = args[-1].shape
    return f"weight {out} x {depth}"


_LINEAR = Op(
    name="linear",
    implementations=(
        _few_tokens(gated=False, pdl=True),
        _few_tokens(gated=False, pdl=False),
        Implementation(name="triton, narrow", configure=_narrow, run=_run_narrow),
        Implementation(name="triton, router", configure=_router, run=_run_narrow),
        Implementation(name="xla", configure=anything, run=_define_linear, kernels=False),
    ),
    describe=_sizes,
)
_GATED_LINEAR = Op(
    name="gated_linear",
    implementations=(
        Implementation(name="hopper", configure=_fused, run=_hopper, label="gated_linear_hopper"),
        _few_tokens(gated=True, pdl=True),
        _few_tokens(gated=True, pdl=False),
        Implementation(name="xla", configure=anything, run=_define_gated, kernels=False),
    ),
    describe=_sizes,
)
_ADD_LINEAR = Op(
    name="add_linear",
    implementations=(
        Implementation(name="xla, adding", configure=_adds, run=_add, kernels=False),
        Implementation(name="linear, then the sum", configure=anything, run=_apart, kernels=False),
    ),
    describe=_sizes,
)
