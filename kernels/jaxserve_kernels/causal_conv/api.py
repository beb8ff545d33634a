"""Causal convolution with state: picks the implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array

from jaxserve_kernels.causal_conv import reference
from jaxserve_kernels.op import Implementation, Op, anything, on_kernels
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
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
    return _BOTH(projected, weight, state, step, layer=layer, target=target)


def convolve(
    projected: Array,
    weight: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    target: Target,
) -> Array:
    """See `reference.convolve`. The step has rows of several tokens."""
    return _OUTPUTS(projected, weight, state, step, layer=layer, target=target)


def keep_inputs(x: Array, state: Array, layer: int, rows: Rows, *, target: Target) -> Array:
    """See `reference.keep_inputs`."""
    return _STATE(x, state, rows, layer=layer, target=target)


def _op(name: str, function: str, describe: Callable[..., str]) -> Op:
    """The operation for a function that both `reference` and `triton` define. `layer` is the
    function's second to last positional argument."""

    def kernel(_: None, *args: Any, layer: int, target: Target) -> Any:
        from jaxserve_kernels.causal_conv import triton  # needs Triton: only for GPUs

        return getattr(triton, function)(*args[:-1], layer, args[-1], target=target)

    def definition(_: None, *args: Any, layer: int, target: Target) -> Any:
        return getattr(reference, function)(*args[:-1], layer, args[-1])

    return Op(
        name=name,
        implementations=(
            Implementation(name="triton", configure=on_kernels, run=kernel),
            Implementation(name="reference", configure=anything, run=definition, kernels=False),
        ),
        describe=describe,
        per_layer=True,
    )


def _of_weight(_: Any, weight: Any, *__: Any, **___: Any) -> str:
    return f"tokens of {weight.shape[0]}"


_BOTH = _op("causal_conv", "causal_conv", _of_weight)
_OUTPUTS = _op("causal_conv_outputs", "convolve", _of_weight)
_STATE = _op("causal_conv_state", "keep_inputs", lambda x, *_, **__: f"tokens of {x.shape[1]}")
