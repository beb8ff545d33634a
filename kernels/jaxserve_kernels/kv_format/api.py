"""Attention of a step over its KV cache: calls the implementation of the cache's format."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format.base import AttentionStep, CacheArrays
from jaxserve_kernels.kv_format.format import format_of
from jaxserve_kernels.target import Target

type KV = Array | CacheArrays
"""The arrays of a cache, in any format."""


def attend(
    qkv: Array,
    kv: KV,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
    target: Target,
) -> tuple[Array, KV]:
    """Stores the keys and values of a step's tokens, and computes the step's attention.

    Bias, QK-norm, RoPE and the KV write are those of `attention_inputs`, attention is that of
    `paged_attention`. Keys and values are read as the format stores them.

    Args:
      qkv: [parts, tokens, (q_heads + 2 * kv_heads) * head_dim], partial sums of the projection.
      kv: the cache, updated in place when donated.
      layer: index of the cache's layer.
      heads: the model's norms, bias and sinks.
      tables: cosines and sines of RoPE, float32 [tokens, head_dim/2] each.
      step: slot, position, page and query tile of each token.
      eps: epsilon of the norms.
      tile_size: the most tokens in a query tile.
      dtype: dtype of the activations.
      window: number of keys that a token sees, including its own; None: all.

    Returns:
      [tokens, q_heads, head_dim] in `dtype`, and kv.

    Raises:
      ValueError: only one of the two norms is given.
    """
    heads.check()
    return format_of(kv).attend(
        qkv, kv, layer, heads, tables, step,
        eps=eps, tile_size=tile_size, dtype=dtype, window=window, target=target,
    )  # fmt: skip


def page_size(kv: KV) -> int:
    """Tokens per page of a cache."""
    return format_of(kv).tokens_per_page(kv)


def end_step(kv: KV, step: AttentionStep, *, tile_size: int, target: Target) -> KV:
    """Finishes a step in the cache after attention in all layers. Returns the cache."""
    return format_of(kv).end_step(kv, step, tile_size=tile_size, target=target)
