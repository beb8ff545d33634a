"""Gated delta rule: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.gated_delta_rule import reference
from jaxserve_kernels.gated_delta_rule.reference import RuleConfig, RuleTokens, RuleWeights
from jaxserve_kernels.op import NO_KERNELS, NOT_HOPPER, Implementation, Op, Refusal, anything
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
    return _BOTH(tokens, weights, state, step, layer=layer, config=config, target=target)


def rule_outputs(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
) -> Array:
    """See `reference.rule_outputs`. No row may be computed in blocks."""
    return _OUTPUTS(tokens, weights, state, step, layer=layer, config=config, target=target)


def advance_state(
    qkv: Array,
    gates: Array,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
) -> Array:
    """See `reference.advance_state`. No row may be computed in blocks."""
    return _STATE(qkv, gates, weights, state, step, layer=layer, config=config, target=target)


def _configure(*_: Any, config: RuleConfig, target: Target, **__: Any) -> Any:
    if not target.uses_triton():
        return NO_KERNELS
    from jaxserve_kernels.gated_delta_rule import triton  # needs Triton: only for GPUs

    return None if triton.fits(config) else Refusal("head sizes are not powers of 2, or below 16")


def _configure_hopper(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
    **_: Any,
) -> Any:
    refused = _configure(config=config, target=target)
    if refused is not None:
        return refused
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    from jaxserve_kernels.gated_delta_rule import hopper_blocks

    if step.rows.blocked is None:
        return Refusal("there are no prompts in blocks")
    if not hopper_blocks.fits(config.heads, config.block, tokens.qkv.dtype):
        return Refusal("heads or blocks of other sizes")
    return None


def _op(name: str, function: str, hopper: tuple[Implementation, ...] = ()) -> Op:
    """The operation for a function that both `reference` and `triton` define. `layer` is the
    function's second to last positional argument. hopper: implementations for Hopper alone."""

    def kernel(_: None, *args: Any, layer: int, **options: Any) -> Any:
        from jaxserve_kernels.gated_delta_rule import triton

        return getattr(triton, function)(*args[:-1], layer, args[-1], **options)

    def definition(_: None, *args: Any, layer: int, config: RuleConfig, target: Target) -> Any:
        return getattr(reference, function)(*args[:-1], layer, args[-1], config=config)

    return Op(
        name=name,
        implementations=(
            *hopper,
            Implementation(name="triton", configure=_configure, run=kernel),
            Implementation(name="reference", configure=anything, run=definition, kernels=False),
        ),
        describe=lambda *_, config, **__: (
            f"tokens of {config.heads.value_heads} heads of {config.heads.key_dim} by "
            f"{config.heads.value_dim}"
        ),
        per_layer=True,
    )


def _on_hopper(
    _: None,
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    step: RecurrentStep,
    *,
    layer: int,
    config: RuleConfig,
    target: Target,
) -> tuple[Array, Array]:
    from jaxserve_kernels.gated_delta_rule import triton

    arrays = (tokens, weights, state, layer, step)
    return triton.rule_and_norm(*arrays, config=config, hopper=True, target=target)


_BOTH = _op(
    "gated_delta_rule",
    "rule_and_norm",
    (Implementation(name="hopper_blocks", configure=_configure_hopper, run=_on_hopper),),
)
_OUTPUTS = _op("gated_delta_rule_outputs", "rule_outputs")
_STATE = _op("gated_delta_rule_state", "advance_state")
