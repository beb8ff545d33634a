"""One decoder layer on the tokens of a step: attention or a delta net, then a feed-forward."""

from __future__ import annotations

import functools
from typing import NamedTuple

from jax import Array
from jax.typing import DTypeLike

from jaxserve.layer_spec import Activation
from jaxserve.model_spec import CachePlace, ModelSpec
from jaxserve.models import attention, delta_net
from jaxserve.models.delta_net import Unsettled
from jaxserve.models.layer_weights import Layer
from jaxserve.models.rope import RopeTables
from jaxserve_kernels.add_rms_norm import add_rms_norm, add_rms_norm_twice
from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.experts import ExpertWeights, Routing, norm_and_score, routed_experts
from jaxserve_kernels.experts import token_format as experts_token_format
from jaxserve_kernels.gated_attention import gated_attention
from jaxserve_kernels.kv_format import KV, AttentionStep, attend
from jaxserve_kernels.matmul import (
    BothForms,
    QuantizedTokens,
    add_linear,
    gated_linear,
    linear,
    token_format,
)
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight

type Caches = tuple[KV | RecurrentState | Unsettled, ...]
"""The keys and values of each cache group (`ModelSpec.cache_groups`), then the state of recurrent
layers, if there are any. In a verify step that state is unsettled."""


def paged(kv: Caches) -> tuple[KV, ...]:
    """Returns the caches without the state of recurrent layers."""
    return tuple(each for each in kv if not isinstance(each, RecurrentState | Unsettled))


type Normed = Array | QuantizedTokens | BothForms
"""Tokens after a norm [tokens, embed], in the form that the next product reads."""


class Norm(NamedTuple):
    """A norm's weight; and the matrix that reads the norm's output, if its input format matters."""

    weight: Array
    reader: Weight | None = None
    twice: bool = False
    """Whether another product reads the output, too, as plain tokens."""


class StepTokens(NamedTuple):
    """The tokens of a step, and their sequences and positions."""

    ids: Array  # int32 [tokens]
    places: tuple[AttentionStep, ...]
    """The place of the tokens in each cache group."""
    recurrent: RecurrentStep | None = None
    """The place of the tokens in the state of recurrent layers, if there are any."""
    active: Array | None = None
    """int32 [tokens], 0 for padding, if there are experts, of which padding gets none."""

    @property
    def positions(self) -> Array:
        """int32 [tokens], the same in all groups."""
        return self.places[0].positions


def decoder_layer(
    layer: Layer,
    next_norm: Norm,
    place: CachePlace,
    x: Array,
    normed: Normed,
    kv: Caches,
    tables: RopeTables,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
) -> tuple[Array, Normed, Caches]:
    """Runs the layer whose cache is at `place` on x [tokens, embed]. `normed` is x after the
    layer's norm. Returns x, x after the next norm, and the caches."""
    own = (layer, place, normed, kv, tables, tokens, spec)
    attention_out, kv = mix(*own, dtype=x.dtype, tile_size=tile_size, target=target)
    own = (layer, next_norm, x, attention_out, spec)
    return *feed_forward(*own, active=tokens.active, target=target), kv


def mix(
    layer: Layer,
    place: CachePlace,
    normed: Normed,
    kv: Caches,
    tables: RopeTables,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    tile_size: int,
    target: Target,
) -> tuple[Array, Caches]:
    """Returns the input of the output projection [tokens, mixed], in `dtype`, and the caches."""
    group, cache = place.group, kv[place.group]
    if isinstance(cache, RecurrentState | Unsettled):
        assert layer.delta is not None and tokens.recurrent is not None
        own = (layer.delta, normed, cache, place.layer, tokens.recurrent, spec)
        mixed, cache = delta_net.mix(*own, target=target)
        return mixed, (*kv[:group], cache)
    assert layer.qkv is not None
    assert not isinstance(normed, BothForms)
    qkv = linear(normed, layer.qkv, target=target)
    call = attend
    if attention.has_prologue(spec):
        call = functools.partial(gated_attention, heads=attention.prologue_heads(spec))
    weights = HeadWeights(layer.q_norm, layer.k_norm, layer.qkv_bias, layer.sinks)
    attention_out, cache = call(
        *(qkv, cache, place.layer, weights, tables, tokens.places[group]),
        eps=spec.norm_eps,
        tile_size=tile_size,
        dtype=dtype,
        window=spec.cache_groups[group].window,
        target=target,
    )
    return attention_out.reshape(normed.shape[0], -1), (*kv[:group], cache, *kv[group + 1 :])


def feed_forward(
    layer: Layer,
    next_norm: Norm,
    x: Array,
    attention_out: Array,
    spec: ModelSpec,
    *,
    active: Array | None = None,
    target: Target,
) -> tuple[Array, Normed]:
    """Runs the part of a layer after its mixer. Returns x, and x after the next norm.

    Args:
      active: see `StepTokens`; None: no token is padding.
    """
    projection = layer.out if layer.delta is None else layer.delta.out
    assert projection is not None
    biased = layer.out_bias is not None
    x, out = add_linear(x, attention_out, projection, biased=biased, target=target)
    block = _dense if layer.experts is None else functools.partial(_experts, active=active)
    x, update = block(layer, x, out, spec, target=target)
    form = token_format(next_norm.reader, x.shape[0], x.dtype, target=target)
    own = (x, update, next_norm.weight, spec.norm_eps, form)
    bias = layer.down_bias if layer.experts is None else None
    norm = add_rms_norm_twice if next_norm.twice else add_rms_norm
    return norm(*own, bias=bias, target=target)


def _dense(
    layer: Layer, x: Array, out: Array | None, spec: ModelSpec, *, target: Target
) -> tuple[Array, Array | None]:
    """Runs the layer's norm and feed-forward on x and `out`, as returned by `matmul.add_linear`.
    Returns such a pair, without the bias of down."""
    assert layer.gate_up is not None and layer.down is not None
    form = token_format(
        layer.gate_up,
        x.shape[0],
        x.dtype,
        gated=layer.gate_up_bias is None,
        activation=_activation(spec),
        target=target,
    )
    own = (x, out, layer.mlp_norm, spec.norm_eps, form)
    x, normed = add_rms_norm(*own, bias=layer.out_bias, target=target)
    gated = gated_linear(
        normed,
        layer.gate_up,
        bias=layer.gate_up_bias,
        activation=_activation(spec),
        target=target,
    )
    biased = layer.down_bias is not None
    return add_linear(x, gated, layer.down, biased=biased, target=target)


def _experts(
    layer: Layer,
    x: Array,
    out: Array | None,
    spec: ModelSpec,
    *,
    active: Array | None,
    target: Target,
) -> tuple[Array, Array]:
    """Runs the layer's norm, router and experts on x and `out`, as returned by `matmul.add_linear`.
    Returns x, and partial sums to add to it."""
    own = spec.experts
    assert layer.experts is not None and layer.router is not None and own is not None
    weights = ExpertWeights(*layer.experts, layer.gate_up_bias, layer.down_bias)
    form = experts_token_format(x, own.top_k, weights, target=target)
    given = (x, out, layer.mlp_norm, spec.norm_eps, layer.router)
    x, normed, scores = norm_and_score(*given, bias=layer.out_bias, form=form, target=target)
    update = routed_experts(
        normed,
        scores,
        Routing(num_experts=own.num_experts, top_k=own.top_k, normalize=own.normalize),
        weights,
        bias=layer.router_bias,
        shared=None if layer.shared is None else ExpertWeights(*layer.shared),
        active=active,
        activation=own.activation,
        target=target,
    )
    return x, update


def _activation(spec: ModelSpec) -> Activation:
    """Returns the activation of the layers without experts."""
    assert spec.feed_forward is not None
    return spec.feed_forward.activation
