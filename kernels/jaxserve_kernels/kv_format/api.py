"""Attention of a step through its KV cache: the format of the cache computes it."""

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
    """Store the keys and values of a step's tokens, and let its queries attend to their contexts.

    Bias, QK-norm, RoPE and the KV write as in `attention_inputs`, then attention as in
    `paged_attention`, over keys and values as the format keeps them.

    Args:
      qkv: [parts, tokens, (q_heads + 2 * kv_heads) * head_dim], partial sums of the projection.
      kv: the cache, updated in place when donated.
      layer: which of the cache's layers.
      heads: norms and bias, of those that the model has.
      tables: cosines and sines of RoPE, float32 [tokens, head_dim/2] each.
      step: where the tokens belong.
      eps: of the norms.
      tile_size: the most tokens that a query tile holds.
      dtype: of the activations.
      window: keys that a token sees, its own among them; None: all.

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
    """What is left to do in the cache when all layers have attended: returns the cache."""
    return format_of(kv).end_step(kv, step, tile_size=tile_size, target=target)
