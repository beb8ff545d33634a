"""The convolution and the gates of a delta net together: picks the implementation.

For few decode rows, with programmatic dependent launch (PDL), one kernel computes both. Otherwise
they are the separate operations `causal_conv` and `linear`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.causal_conv.api import causal_conv
from jaxserve_kernels.causal_conv.gates_config import Config, choose
from jaxserve_kernels.matmul import linear
from jaxserve_kernels.op import Implementation, Op, Refusal, anything
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target


def conv_and_gates(
    x: Array,
    projected: Array,
    gates: Array,
    weight: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    target: Target,
) -> tuple[Array, Array, Array]:
    """`causal_conv` of projected, and `linear` of x with the gates' weight.

    Args:
      x: [tokens, embed], the layer's normed input.
      projected, weight, state, layer, step: see `reference.causal_conv`.
      gates: [rows, embed], the gates' weight.

    Returns:
      y [tokens, channels], the gates float32 [parts, tokens, rows] as partial sums, and state.
    """
    return _BOTH(x, projected, gates, weight, state, step, layer=layer, target=target)


def _configure(
    x: Array,
    _projected: Array,
    gates: Array,
    _weight: Array,
    _state: Array,
    step: RecurrentStep,
    *,
    target: Target,
    **_: Any,
) -> Config | Refusal:
    return choose(x, gates, step, target=target)


def _together(
    config: Config,
    x: Array,
    projected: Array,
    gates: Array,
    weight: Array,
    state: Array,
    step: RecurrentStep,
    *,
    layer: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    from jaxserve_kernels.causal_conv import triton_gates  # needs Triton: only for GPUs

    arrays = x, projected, gates, weight, state
    return triton_gates.conv_and_gates(config, *arrays, layer, step, target=target)


def _apart(
    _: None,
    x: Array,
    projected: Array,
    gates: Array,
    weight: Array,
    state: Array,
    step: RecurrentStep,
    *,
    layer: int,
    target: Target,
) -> tuple[Array, Array, Array]:
    scores = linear(x, gates, jnp.float32, target=target)
    mixed, kept = causal_conv(projected, weight, state, layer, step, target=target)
    return mixed, scores, kept


_BOTH = Op(
    name="conv_and_gates",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_together),
        Implementation(name="apart", configure=anything, run=_apart, kernels=False),
    ),
    describe=lambda x, _projected, gates, weight, *_, **__: (
        f"tokens of {weight.shape[0]}, {gates.shape[0]} gates of {x.shape[-1]}"
    ),
    per_layer=True,
)
