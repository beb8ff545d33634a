"""Products with unquantised weights: picks the implementation by target and number of tokens."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve_kernels.activation import Activation
from jaxserve_kernels.dense_matmul import reference
from jaxserve_kernels.dense_matmul.config import (
    ADDING_MIN_TOKENS,
    Config,
    choose,
    fuses_gating,
)
from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.target import Target


def linear(x: Array, weight: Array, dtype: DTypeLike | None = None, *, target: Target) -> Array:
    """See `matmul.linear`."""
    config = _config(x, weight, target=target)
    if config is None:
        return reference.linear(x, weight, dtype or x.dtype)
    return _kernels(target=target).linear(x, weight, config, target=target)


def add_linear(
    total: Array, x: Array, weight: Array, *, target: Target
) -> tuple[Array, Array | None]:
    """See `matmul.add_linear`."""
    if (
        x.shape[0] < ADDING_MIN_TOKENS
        or not _on_gpu(x, target=target)
        or _config(x, weight, target=target) is not None
    ):
        return total, linear(x, weight, target=target)
    # XLA gives the sum to cuBLASLt, which adds it before it rounds.
    return lax.optimization_barrier(total + reference.linear(x, weight, total.dtype)[0]), None


def gated_linear(
    x: Array, weight: Array, activation: Activation = "silu", *, target: Target
) -> Array:
    """See `reference.gated_linear`."""
    if _on_gpu(x, target=target) and target.runs_hopper_kernels():
        out, depth = weight.shape
        if fuses_gating(tokens=x.shape[0], out=out, depth=depth):
            from jaxserve_kernels.dense_matmul import hopper  # needs Triton: only for GPUs

            kernel = functools.partial(hopper.gated_linear, activation=activation, target=target)
            if compiles("gated_linear_hopper", kernel, x, weight, static=activation, target=target):
                return kernel(x, weight)
    config = _config(x, weight, gated=True, target=target)
    if config is None:
        return reference.gated_linear(x, weight, activation)
    return _kernels(target=target).gated_linear(x, weight, config, activation, target=target)


def _config(x: Array, weight: Array, *, gated: bool = False, target: Target) -> Config | None:
    """None: XLA's product, which is cuBLASLt on a GPU."""
    if not _on_gpu(x, target=target):
        return None
    config = choose(
        gated=gated, tokens=x.shape[0], out=weight.shape[0], depth=weight.shape[1], target=target
    )
    if config is None:
        return None
    kernels = _kernels(target=target)
    kernel = kernels.gated_linear if gated else kernels.linear
    launch = functools.partial(kernel, config=config, target=target)
    name = "gated_linear" if gated else "linear"
    return config if compiles(name, launch, x, weight, static=config, target=target) else None


def _kernels(*, target: Target) -> Any:
    """The module with the kernels for few tokens; it needs Triton: only for GPUs."""
    name = "triton_streaming" if target.pdl else "triton"
    return importlib.import_module(f"{__package__}.{name}")


def _on_gpu(x: Array, *, target: Target) -> bool:
    """Whether kernels of ours may compute with x."""
    return x.dtype == jnp.bfloat16 and target.uses_triton()
