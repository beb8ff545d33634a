"""Recurrent layers: linear attention by the gated delta rule after a causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.layer_spec import DeltaNetSpec
from jaxserve.model_spec import ModelSpec
from jaxserve_kernels.causal_conv import Operands, conv_and_gates, convolve, keep_inputs
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    RuleTokens,
    RuleWeights,
    advance_state,
    gated_delta_rule,
    rule_outputs,
)
from jaxserve_kernels.matmul import BothForms, QuantizedTokens, linear, plain, sum_parts
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


class DeltaNet(NamedTuple):
    """Weights of a delta net. Matrices are [out, in], as on disk. The large ones may be
    quantised."""

    in_proj: Weight  # [channels + values, embed]: queries, keys, values, and gates of the output
    in_gates: Array  # [2 * value_heads, embed]: gates of decays, then of writes
    conv: Array  # [channels, conv_width]
    a_log: Array  # float32 [value_heads]
    dt_bias: Array  # float32 [value_heads]
    norm: Array  # [value_dim]
    out: Weight  # [embed, values]


def abstract(spec: DeltaNetSpec, embed: int, dtype: DTypeLike) -> DeltaNet:
    """Returns the shapes and dtypes of the weights for hidden states of `embed` elements."""

    def array(*shape: int, dtype: DTypeLike = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return DeltaNet(
        in_proj=array(spec.channels + spec.values, embed),
        in_gates=array(2 * spec.value_heads, embed),
        conv=array(spec.channels, spec.conv_width),
        a_log=array(spec.value_heads, dtype=jnp.float32),
        dt_bias=array(spec.value_heads, dtype=jnp.float32),
        norm=array(spec.value_dim),
        out=array(embed, spec.values),
    )


def abstract_state(spec: ModelSpec, dtype: DTypeLike, slots: int) -> RecurrentState | None:
    """Returns the shapes and dtypes of the state of the recurrent layers; None: there are none.

    Args:
      dtype: dtype of activations.
      slots: number of slots, including the padding slot.
    """
    if spec.state is None:
        return None
    layers, own = len(spec.state.layers), spec.state.delta_net
    conv = (layers, slots, own.conv_width - 1, own.channels)
    delta = (layers, slots, own.value_heads, own.key_dim, own.value_dim)
    return RecurrentState(
        conv=jax.ShapeDtypeStruct(conv, dtype),  # type: ignore[arg-type]
        delta=jax.ShapeDtypeStruct(delta, jnp.float32),  # type: ignore[arg-type]
    )


class LayerInputs(NamedTuple):
    """Inputs of a step's tokens to a layer's state, in the dtype of activations."""

    conv: Array  # [tokens, channels], see `causal_conv.reference.keep_inputs`
    qkv: Array  # [tokens, channels], see `gated_delta_rule.reference.advance_state`
    gates: Array  # [tokens, 2 * value_heads]


class Unsettled(NamedTuple):
    """State before a step whose number of accepted tokens is not known yet. Layers read the state
    and collect their inputs to it. `settle` applies the inputs later."""

    state: RecurrentState
    inputs: tuple[LayerInputs, ...] = ()
    """Inputs of the layers so far."""


def input_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Returns the bytes of a token's `LayerInputs` in all layers."""
    if spec.state is None:
        return 0
    own = spec.state.delta_net
    return len(spec.state.layers) * 2 * (own.channels + own.value_heads) * itemsize


def mix(
    weights: DeltaNet,
    normed: Array | QuantizedTokens | BothForms,
    state: RecurrentState | Unsettled,
    layer: int,
    step: RecurrentStep,
    spec: ModelSpec,
    *,
    target: Target,
) -> tuple[Array, RecurrentState | Unsettled]:
    """Runs a step's tokens through a delta net, without its output projection.

    Args:
      normed: [tokens, embed], the layer's input after its norm.
      state: state of all recurrent layers, updated in place if donated.
      layer: index among the recurrent layers.
      step: the slots and positions of the tokens.

    Returns:
      [tokens, values] in the dtype of activations, and state.
    """
    read = normed.quantized if isinstance(normed, BothForms) else normed
    projected, x = linear(read, weights.in_proj, target=target), plain(normed)
    if isinstance(state, Unsettled):
        assert layer == len(state.inputs)
        gates = linear(x, weights.in_gates, jnp.float32, target=target)
        own = (weights, projected, gates, state.state, layer, step, spec)
        out, inputs = _looked_ahead(*own, target=target)
        return out, state._replace(inputs=(*state.inputs, inputs))
    operands = Operands(x, projected, weights.in_gates, weights.conv, state.conv, step)
    mixed, gates, conv = conv_and_gates(operands, layer, target=target)
    out, delta = gated_delta_rule(
        RuleTokens(mixed, gates, projected),
        RuleWeights(weights.a_log, weights.dt_bias, weights.norm),
        *(state.delta, layer, step),
        config=_rule_config(spec),
        target=target,
    )
    return out, RecurrentState(conv, delta)


def _looked_ahead(
    weights: DeltaNet,
    projected: Array,
    gates: Array,
    state: RecurrentState,
    layer: int,
    step: RecurrentStep,
    spec: ModelSpec,
    *,
    target: Target,
) -> tuple[Array, LayerInputs]:
    """`mix` for a step with unsettled state."""
    mixed = convolve(projected, weights.conv, state.conv, layer, step, target=target)
    out = rule_outputs(
        RuleTokens(mixed, gates, projected),
        RuleWeights(weights.a_log, weights.dt_bias, weights.norm),
        *(state.delta, layer, step),
        config=_rule_config(spec),
        target=target,
    )
    channels, dtype = weights.conv.shape[0], state.conv.dtype
    conv = sum_parts(projected[..., :channels], dtype)
    return out, LayerInputs(conv, mixed, sum_parts(gates, dtype))


def settle(
    weights: Sequence[DeltaNet],
    unsettled: Unsettled,
    step: RecurrentStep,
    spec: ModelSpec,
    *,
    target: Target,
) -> RecurrentState:
    """Returns the state after a step.

    Args:
      weights: weights of all recurrent layers.
      step: the accepted tokens of the step (`RecurrentStep.cut`). The result is computed from the
        same numbers in the same order as if the step had no other tokens.
    """
    (conv, delta), config = unsettled.state, _rule_config(spec)
    for layer, (own, inputs) in enumerate(zip(weights, unsettled.inputs, strict=True)):
        with jax.named_scope(f"settle_{layer}"):
            conv = keep_inputs(inputs.conv, conv, layer, step.rows, target=target)
            rule = RuleWeights(own.a_log, own.dt_bias, own.norm)
            arrays = (inputs.qkv, inputs.gates, rule, delta, layer, step)
            delta = advance_state(*arrays, config=config, target=target)
    return RecurrentState(conv, delta)


def _rule_config(spec: ModelSpec) -> RuleConfig:
    assert spec.state is not None
    own = spec.state.delta_net
    heads = Heads(own.key_heads, own.value_heads, own.key_dim, own.value_dim)
    return RuleConfig(heads=heads, block=own.block, eps=spec.norm_eps)
