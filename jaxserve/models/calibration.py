"""Runs a model on a text and collects the inputs of each matrix, for quantisers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.layer_spec import FeedForwardSpec, LayerSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.decoder import Params
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.models.rope import rope_tables
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs.reference import HeadWeights, heads_of
from jaxserve_kernels.matmul import gated_linear, linear, sum_parts, take_rows
from jaxserve_kernels.target import REFERENCE
from jaxserve_kernels.weights.awq import InputStatistics, statistics


class LayerInputs[Of](NamedTuple):
    """For each matrix of a layer, its inputs [tokens, in], or statistics of them."""

    qkv: Of
    out: Of
    gate_up: Of
    down: Of


def layer_statistics(
    params: Params, sequences: Array, spec: ModelSpec
) -> Iterator[LayerInputs[InputStatistics]]:
    """Yields the statistics of each layer of the unquantised model on token ids [sequences,
    tokens]."""
    dtype = params.final_norm.dtype
    x = jax.vmap(lambda ids: take_rows(params.embedding, ids, dtype))(sequences)
    for layer, each in zip(layer_views(params.layers), spec.layers, strict=True):
        x, found = _layer_statistics(layer, x, each, eps=spec.norm_eps)
        yield found


@functools.partial(jax.jit, static_argnames=("spec", "eps"), donate_argnames="x")
def _layer_statistics(
    layer: Layer, x: Array, spec: LayerSpec, *, eps: float
) -> tuple[Array, LayerInputs[InputStatistics]]:
    def read(sequence: Array) -> tuple[Array, LayerInputs[InputStatistics]]:
        sequence, inputs = run_layer(layer, sequence, spec, eps=eps)
        return sequence, LayerInputs(*(statistics(each) for each in inputs))

    x, found = jax.lax.map(read, x)
    return x, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)


def run_layer(
    layer: Layer, x: Array, spec: LayerSpec, *, eps: float
) -> tuple[Array, LayerInputs[Array]]:
    """Runs one sequence x [tokens, embed] through a layer like `decoder.forward`, without a cache.

    Returns the layer's output and the inputs of each matrix.
    """
    tokens, attention = x.shape[0], spec.attention
    assert attention is not None and layer.qkv is not None and layer.out is not None
    attention_in = rms_norm(x, layer.attention_norm, eps)
    q, k, v = heads_of(
        linear(attention_in, layer.qkv, target=REFERENCE),
        HeadWeights(layer.q_norm, layer.k_norm, layer.qkv_bias),
        rope_tables(attention, jnp.arange(tokens)),
        kv_heads=attention.kv_heads,
        eps=eps,
        dtype=x.dtype,
    )
    wide = (each.astype(jnp.float32) for each in (q, k, v))
    attention_out = jax.nn.dot_product_attention(*wide, is_causal=True)
    attention_out = attention_out.astype(x.dtype).reshape(tokens, -1)
    x = x + sum_parts(
        linear(attention_out, layer.out, bias=layer.out_bias, target=REFERENCE), x.dtype
    )
    assert layer.gate_up is not None and layer.down is not None
    assert isinstance(spec.feed_forward, FeedForwardSpec)
    mlp_in = rms_norm(x, layer.mlp_norm, eps)
    gated = gated_linear(
        mlp_in,
        layer.gate_up,
        bias=layer.gate_up_bias,
        activation=spec.feed_forward.activation,
        target=REFERENCE,
    )
    x = x + sum_parts(linear(gated, layer.down, bias=layer.down_bias, target=REFERENCE), x.dtype)
    return x, LayerInputs(attention_in, attention_out, mlp_in, gated)
