"""The convolution and the gates of a delta net together: picks the implementation.

For few decode rows, with programmatic dependent launch (PDL), one kernel computes both. Otherwise
they are the separate operations `causal_conv` and `linear`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.causal_conv.api import causal_conv
from jaxserve_kernels.causal_conv.gates_config import Config, Operands, choose
from jaxserve_kernels.matmul import linear
from jaxserve_kernels.op import Implementation, Op, Refusal, anything
from jaxserve_kernels.target import Target


def conv_and_gates(operands: Operands, layer: int, *, target: Target) -> tuple[Array, Array, Array]:
    """`causal_conv` of projected, and `linear` of x with the gates' weight.

    Args:
      layer: index into the first axis of the state.

    Returns:
      y [tokens, channels]; the gates [parts, tokens, rows], partial sums in float32 or one part in
      x's dtype, to which the rule rounds their sum; and the state.
    """
    return _BOTH(operands, layer=layer, target=target)


def _configure(operands: Operands, *, target: Target, **_: Any) -> Config | Refusal:
    return choose(operands, target=target)


def _together(config: Config, operands: Operands, *, layer: int, target: Target) -> Any:
    from jaxserve_kernels.causal_conv import triton_gates  # needs Triton: only for GPUs

    return triton_gates.conv_and_gates(config, operands, layer, target=target)


def _apart(
    _: None, operands: Operands, *, layer: int, target: Target
) -> tuple[Array, Array, Array]:
    x, projected, gates, weight, state, step = operands
    # Outside a chain XLA would round the sums in a kernel of its own.
    rounded = target.uses_triton() and not target.pdl
    scores = linear(x, gates, None if rounded else jnp.float32, target=target)
    mixed, kept = causal_conv(projected, weight, state, layer, step, target=target)
    return mixed, scores, kept


_BOTH = Op(
    name="conv_and_gates",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_together),
        Implementation(name="apart", configure=anything, run=_apart, kernels=False),
    ),
    describe=lambda operands, **_: (
        f"tokens of {operands.weight.shape[0]}, {operands.gates.shape[0]} gates of "
        f"{operands.x.shape[-1]}"
    ),
    per_layer=True,
)
