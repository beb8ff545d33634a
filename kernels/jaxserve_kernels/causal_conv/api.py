"""Causal convolution with state: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.causal_conv import reference
from jaxserve_kernels.op import Implementation, Op, anything, on_kernels
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target


def causal_conv(
    projected: Array,
    weight: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.causal_conv`."""
    return _OP(projected, weight, state, step, layer=layer, target=target)


def _kernel(_: None, *args: Any, layer: int, target: Target) -> Any:
    from jaxserve_kernels.causal_conv import triton  # needs Triton: only for GPUs

    projected, weight, state, step = args
    return triton.causal_conv(projected, weight, state, layer, step, target=target)


def _definition(_: None, *args: Any, layer: int, target: Target) -> Any:
    projected, weight, state, step = args
    return reference.causal_conv(projected, weight, state, layer, step)


_OP = Op(
    name="causal_conv",
    implementations=(
        Implementation(name="triton", configure=on_kernels, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda _, weight, *__, **___: f"tokens of {weight.shape[0]}",
    per_layer=True,
)
