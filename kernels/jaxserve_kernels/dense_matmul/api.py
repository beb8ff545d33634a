"""Products with unquantised weights: picks the implementation by target and number of tokens."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve_kernels import early, target
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.dense_matmul import reference
from jaxserve_kernels.dense_matmul.config import (
    ADDING_MIN_TOKENS,
    Config,
    choose,
    fuses_gating,
)
from jaxserve_kernels.fallback import compiles


def linear(x: Array, weight: Array, dtype: DTypeLike | None = None) -> Array:
    """See `matmul.linear`."""
    config = _config(x, weight)
    if config is None:
        return reference.linear(x, weight, dtype or x.dtype)
    return _kernels().linear(x, weight, config)


def add_linear(total: Array, x: Array, weight: Array) -> tuple[Array, Array | None]:
    """See `matmul.add_linear`."""
    if x.shape[0] < ADDING_MIN_TOKENS or not _on_gpu(x) or _config(x, weight) is not None:
        return total, linear(x, weight)
    # XLA gives the sum to cuBLASLt, which adds it before it rounds.
    return lax.optimization_barrier(total + reference.linear(x, weight, total.dtype)[0]), None


def gated_linear(x: Array, weight: Array, activation: Activation = "silu") -> Array:
    """See `reference.gated_linear`."""
    if _on_gpu(x) and target.runs_hopper_kernels():
        out, depth = weight.shape
        if fuses_gating(tokens=x.shape[0], out=out, depth=depth):
            from jaxserve_kernels.dense_matmul import hopper  # needs Triton: only for GPUs

            kernel = functools.partial(hopper.gated_linear, activation=activation)
            if compiles("gated_linear_hopper", kernel, x, weight, static=activation):
                return kernel(x, weight)
    config = _config(x, weight, gated=True)
    if config is None:
        return reference.gated_linear(x, weight, activation)
    return _kernels().gated_linear(x, weight, config, activation)


def _config(x: Array, weight: Array, *, gated: bool = False) -> Config | None:
    """None: XLA's product, which is cuBLASLt on a GPU."""
    if not _on_gpu(x):
        return None
    config = choose(gated=gated, tokens=x.shape[0], out=weight.shape[0], depth=weight.shape[1])
    if config is None:
        return None
    kernel = _kernels().gated_linear if gated else _kernels().linear
    launch = functools.partial(kernel, config=config)
    name = "gated_linear" if gated else "linear"
    return config if compiles(name, launch, x, weight, static=config) else None


def _kernels() -> Any:
    """The module with the kernels for few tokens; it needs Triton: only for GPUs."""
    name = "triton_streaming" if early.starts() else "triton"
    return importlib.import_module(f"{__package__}.{name}")


def _on_gpu(x: Array) -> bool:
    """Whether kernels of ours may compute with x."""
    return x.dtype == jnp.bfloat16 and target.uses_triton()
