"""Gated delta rule: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.gated_delta_rule import reference
from jaxserve_kernels.gated_delta_rule.reference import Heads
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, Refusal, anything
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target


def gated_delta_rule(
    qkv: Array,
    gates: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    heads: Heads,
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.gated_delta_rule`."""
    return _OP(
        qkv, gates, a_log, dt_bias, state, step,
        layer=layer, heads=heads, target=target,
    )  # fmt: skip


def _configure(*_: Any, heads: Heads, target: Target, **__: Any) -> Any:
    if not target.uses_triton():
        return NO_KERNELS
    from jaxserve_kernels.gated_delta_rule import triton  # needs Triton: only for GPUs

    return None if triton.fits(heads) else Refusal("heads are not powers of 2 from 16 on")


def _kernel(
    _: None, qkv: Array, gates: Array, a_log: Array, dt_bias: Array, state: Array, step: Any, *,
    layer: int, **options: Any,
) -> Any:  # fmt: skip
    from jaxserve_kernels.gated_delta_rule import triton

    return triton.gated_delta_rule(qkv, gates, a_log, dt_bias, state, layer, step, **options)


def _definition(
    _: None, qkv: Array, gates: Array, a_log: Array, dt_bias: Array, state: Array, step: Any, *,
    layer: int, target: Target, **options: Any,
) -> Any:  # fmt: skip
    return reference.gated_delta_rule(qkv, gates, a_log, dt_bias, state, layer, step, **options)


_OP = Op(
    name="gated_delta_rule",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda qkv, *_, heads, **__: (
        f"tokens of {heads.value_heads} heads of {heads.key_dim} by {heads.value_dim}"
    ),
    per_layer=True,
)
