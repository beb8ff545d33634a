"""Attention of a step through its KV cache: the type of the cache picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels.kv_format import dense
from jaxserve_kernels.kv_format.base import AttentionStep

type KV = Array
"""The arrays of a cache, in any format."""


def attend(
    qkv: Array,
    kv: KV,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
) -> tuple[Array, KV]:
    """Store the keys and values of a step's tokens, and let its queries attend to their contexts.

    QK-norm, RoPE and the KV write as in `attention_inputs`, then attention as in
    `paged_attention`, over keys and values as the format keeps them.

    Args:
      qkv: [parts, tokens, (q_heads + 2 * kv_heads) * head_dim], partial sums of the projection.
      kv: the cache, updated in place when donated.
      layer: which of the cache's layers.
      norms: weights of the query and key norms, [head_dim] each; their dtype is the activations'.
      tables: cosines and sines of RoPE, float32 [tokens, head_dim/2] each.
      step: where the tokens belong.
      tile_size: the most tokens that a query tile holds.

    Returns:
      [tokens, q_heads, head_dim] in the activations' dtype, and kv.
    """
    return dense.attend(qkv, kv, layer, norms, tables, step, eps=eps, tile_size=tile_size)


def page_size(kv: KV) -> int:
    """Tokens per page."""
    return kv.shape[4]
