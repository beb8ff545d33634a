"""Causal convolution with state: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.causal_conv import reference
from jaxserve_kernels.op import Implementation, Op, anything
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target


def causal_conv(
    x: Array, weight: Array, state: Array, layer: int, step: RecurrentStep, *, target: Target
) -> tuple[Array, Array]:
    """See `reference.causal_conv`."""
    return _OP(x, weight, state, step, layer=layer, target=target)


def _definition(
    _: None, x: Array, weight: Array, state: Array, step: Any, *, layer: int, target: Target
) -> Any:
    return reference.causal_conv(x, weight, state, layer, step)


_OP = Op(
    name="causal_conv",
    implementations=(
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda x, *_, **__: f"tokens of {x.shape[-1]}",
    per_layer=True,
)
