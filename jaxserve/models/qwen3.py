"""Qwen3 dense decoder (`Qwen3ForCausalLM`): parameters, their names on disk, and the forward pass.

Grouped-query attention with an RMSNorm on every query and key head, RoPE, SwiGLU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxserve_checkpoints.naming import Rule
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention

from jaxserve.config import ModelSpec
from jaxserve.models.layers import linear, rms_norm, rope, rope_tables, swiglu


class Layer(NamedTuple):
    """One decoder layer. Matrices are [out, in], as on disk."""

    attention_norm: Array  # [embed]
    qkv: Array  # [q_size + 2 * kv_size, embed]: queries, keys, values
    q_norm: Array  # [head_dim]
    k_norm: Array  # [head_dim]
    out: Array  # [embed, q_size]
    mlp_norm: Array  # [embed]
    gate_up: Array  # [2 * ffn, embed]: gate, then up
    down: Array  # [embed, ffn]


class Params(NamedTuple):
    """All weights. `lm_head` is None when it is tied to the embedding."""

    embedding: Array  # [vocab, embed]
    layers: tuple[Layer, ...]
    final_norm: Array  # [embed]
    lm_head: Array | None  # [vocab, embed]


class StepTokens(NamedTuple):
    """Where the tokens of a step belong. All arrays int32; padding tokens point to page 0."""

    ids: Array  # [tokens]
    positions: Array  # [tokens]
    pages: Array  # [tokens]: page that takes the token's key and value
    offsets: Array  # [tokens]: place within the page
    tiles: QueryTiles
    page_table: Array  # [slots, pages_per_seq]


def abstract(spec: ModelSpec, dtype: DTypeLike) -> Params:
    """Shapes and dtypes of the parameters."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = Layer(
        attention_norm=array(spec.embed),
        qkv=array(spec.q_size + 2 * spec.kv_size, spec.embed),
        q_norm=array(spec.head_dim),
        k_norm=array(spec.head_dim),
        out=array(spec.embed, spec.q_size),
        mlp_norm=array(spec.embed),
        gate_up=array(2 * spec.ffn, spec.embed),
        down=array(spec.embed, spec.ffn),
    )
    return Params(
        embedding=array(spec.vocab_size, spec.embed),
        layers=(layer,) * spec.num_layers,
        final_norm=array(spec.embed),
        lm_head=None if spec.tie_embeddings else array(spec.vocab_size, spec.embed),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Which tensors of a Hugging Face checkpoint make up each parameter."""
    block = "model.layers.{layer}."
    attention, mlp = block + "self_attn.", block + "mlp."

    def weights(prefix: str, *names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}.weight" for name in names)

    return (
        Rule("embedding", ("model.embed_tokens.weight",)),
        Rule("layers.{layer}.attention_norm", weights(block, "input_layernorm")),
        Rule("layers.{layer}.qkv", weights(attention, "q_proj", "k_proj", "v_proj")),
        Rule("layers.{layer}.q_norm", weights(attention, "q_norm")),
        Rule("layers.{layer}.k_norm", weights(attention, "k_norm")),
        Rule("layers.{layer}.out", weights(attention, "o_proj")),
        Rule("layers.{layer}.mlp_norm", weights(block, "post_attention_layernorm")),
        Rule("layers.{layer}.gate_up", weights(mlp, "gate_proj", "up_proj")),
        Rule("layers.{layer}.down", weights(mlp, "down_proj")),
        Rule("final_norm", ("model.norm.weight",)),
        *(() if spec.tie_embeddings else (Rule("lm_head", ("lm_head.weight",)),)),
    )


def forward(
    params: Params, kv: Array, tokens: StepTokens, spec: ModelSpec, *, tile_size: int
) -> tuple[Array, Array]:
    """Run the decoder over a step's tokens and store their keys and values.

    Args:
      kv: [layers, pages, kv_heads, 2, page_size, head_dim], updated in place when donated.

    Returns:
      Hidden states after the final norm [tokens, embed], and kv.
    """
    x = params.embedding[tokens.ids]
    cos, sin = rope_tables(spec, tokens.positions)
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{index}"):
            normed = rms_norm(x, layer.attention_norm, spec.norm_eps)
            q, k, v = _project(layer, normed, cos, sin, spec)
            kv = kv_write(kv, index, k, v, tokens.pages, tokens.offsets)
            attended = paged_attention(
                q, kv, index, tokens.page_table, tokens.tiles, tile_size=tile_size
            )
            x = _residual(x, linear(attended.reshape(x.shape[0], -1), layer.out))
            normed = rms_norm(x, layer.mlp_norm, spec.norm_eps)
            x = _residual(x, linear(swiglu(linear(normed, layer.gate_up)), layer.down))
    return rms_norm(x, params.final_norm, spec.norm_eps), kv


def logits(params: Params, hidden: Array) -> Array:
    """Scores of the next token: hidden [rows, embed] to float32 [rows, vocab]."""
    head = params.embedding if params.lm_head is None else params.lm_head
    return jax.lax.dot_general(
        hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _project(
    layer: Layer, x: Array, cos: Array, sin: Array, spec: ModelSpec
) -> tuple[Array, Array, Array]:
    """Queries, keys (normed, rotated) and values: [tokens, heads, head_dim] each."""
    qkv = linear(x, layer.qkv).reshape(x.shape[0], -1, spec.head_dim)
    q, k, v = jnp.split(qkv, [spec.q_heads, spec.q_heads + spec.kv_heads], axis=1)
    q = rope(rms_norm(q, layer.q_norm, spec.norm_eps), cos, sin)
    k = rope(rms_norm(k, layer.k_norm, spec.norm_eps), cos, sin)
    return q, k, v


def _residual(x: Array, update: Array) -> Array:
    """x + update behind a barrier: without it XLA re-reads every earlier update in each norm."""
    return jax.lax.optimization_barrier(x + update)
