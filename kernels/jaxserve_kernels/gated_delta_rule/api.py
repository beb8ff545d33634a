"""Gated delta rule: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.gated_delta_rule import reference
from jaxserve_kernels.gated_delta_rule.reference import RuleConfig, RuleTokens, RuleWeights
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, Refusal, anything
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target


def gated_delta_rule(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.rule_and_norm`."""
    return _OP(tokens, weights, state, step, layer=layer, config=config, target=target)


def _configure(*_: Any, config: RuleConfig, target: Target, **__: Any) -> Any:
    if not target.uses_triton():
        return NO_KERNELS
    from jaxserve_kernels.gated_delta_rule import triton  # needs Triton: only for GPUs

    return None if triton.fits(config) else Refusal("heads are not powers of 2 from 16 on")


def _kernel(_: None, *args: Any, layer: int, **options: Any) -> Any:
    from jaxserve_kernels.gated_delta_rule import triton

    tokens, weights, state, step = args
    return triton.rule_and_norm(tokens, weights, state, layer, step, **options)


def _definition(_: None, *args: Any, layer: int, config: RuleConfig, target: Target) -> Any:
    tokens, weights, state, step = args
    return reference.rule_and_norm(tokens, weights, state, layer, step, config=config)


_OP = Op(
    name="gated_delta_rule",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda *_, config, **__: (
        f"tokens of {config.heads.value_heads} heads of {config.heads.key_dim} by "
        f"{config.heads.value_dim}"
    ),
    per_layer=True,
)
