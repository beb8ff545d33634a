"""What the matrices of each layer take in while the model reads a text: for quantisers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models.decoder import Layer, Params, layer_views
from jaxserve.models.rope import rope_tables
from jaxserve_kernels import target
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs.reference import heads_of
from jaxserve_kernels.matmul import gated_linear, linear, sum_parts, take_rows
from jaxserve_kernels.weights.awq import InputStatistics, statistics


class LayerInputs[Of](NamedTuple):
    """Of each matrix of a layer: its inputs [tokens, in], or statistics of them."""

    qkv: Of
    out: Of
    gate_up: Of
    down: Of


def layer_statistics(
    params: Params, sequences: Array, spec: ModelSpec
) -> Iterator[LayerInputs[InputStatistics]]:
    """Layer after layer, of the unquantised model over token ids [sequences, tokens]."""
    dtype = params.final_norm.dtype
    x = jax.vmap(lambda ids: take_rows(params.embedding, ids, dtype))(sequences)
    for layer in layer_views(params.layers):
        x, found = _layer_statistics(layer, x, spec)
        yield found


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="x")
def _layer_statistics(
    layer: Layer, x: Array, spec: ModelSpec
) -> tuple[Array, LayerInputs[InputStatistics]]:
    def read(sequence: Array) -> tuple[Array, LayerInputs[InputStatistics]]:
        sequence, inputs = run_layer(layer, sequence, spec)
        return sequence, LayerInputs(*(statistics(each) for each in inputs))

    x, found = jax.lax.map(read, x)
    return x, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)


def run_layer(layer: Layer, x: Array, spec: ModelSpec) -> tuple[Array, LayerInputs[Array]]:
    """One sequence x [tokens, embed] through a layer as `decoder.forward` does it, without a cache.

    Returns what comes out, and what each matrix took in.
    """
    tokens = x.shape[0]
    assert layer.q_norm is not None and layer.k_norm is not None
    with target.use(target.Target("reference")):
        attention_in = rms_norm(x, layer.attention_norm, spec.norm_eps)
        q, k, v = heads_of(
            sum_parts(linear(attention_in, layer.qkv), x.dtype),
            (layer.q_norm, layer.k_norm),
            rope_tables(spec.attention, jnp.arange(tokens)),
            kv_heads=spec.kv_heads,
            eps=spec.norm_eps,
        )
        wide = (each.astype(jnp.float32) for each in (q, k, v))
        attended = jax.nn.dot_product_attention(*wide, is_causal=True)
        attended = attended.astype(x.dtype).reshape(tokens, -1)
        x = x + sum_parts(linear(attended, layer.out), x.dtype)
        mlp_in = rms_norm(x, layer.mlp_norm, spec.norm_eps)
        gated = gated_linear(mlp_in, layer.gate_up)
        x = x + sum_parts(linear(gated, layer.down), x.dtype)
    return x, LayerInputs(attention_in, attended, mlp_in, gated)
