"""Attention of a step through its KV cache: the type of the cache picks the implementation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format import chunks, dense, eight_bit, kvarn
from jaxserve_kernels.kv_format.base import AttentionStep, KVFormat
from jaxserve_kernels.kv_format.dense import Dense
from jaxserve_kernels.kv_format.eight_bit import Fp8, Fp8KV, Int8KV
from jaxserve_kernels.kv_format.kvarn import KVarN, KVarNKV
from jaxserve_kernels.target import Target

type KV = Array | Int8KV | Fp8KV | KVarNKV
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
    if isinstance(kv, Int8KV | Fp8KV):
        run: Any = eight_bit.attend
    else:
        run = kvarn.attend if isinstance(kv, KVarNKV) else dense.attend
    return run(
        qkv, kv, layer, heads, tables, step,
        eps=eps, tile_size=tile_size, dtype=jnp.dtype(dtype), window=window, target=target,
    )  # fmt: skip


def own_tokens(kv_format: KVFormat) -> int:
    """Tokens at the beginning, in whole pages, that each sequence has to compute itself: a page
    that others have computed does not give it all that the format keeps of them."""
    return kv_format.group if isinstance(kv_format, KVarN) else 0


def max_chunk_context(kv_format: KVFormat, max_model_len: int, *, page_size: int) -> int | None:
    """Tokens, in whole pages, that the chunks of one step may see together; None: any number."""
    if isinstance(kv_format, Dense):
        return None
    return chunks.capacity(-(-max_model_len // page_size) * page_size)


def expanded_tokens(
    kv_format: KVFormat, max_model_len: int, *, step_tokens: int, sequences: int
) -> int:
    """Tokens whose keys and values a mixed step holds in full precision, one layer at a time."""
    if isinstance(kv_format, Dense):
        return 0
    context = chunks.capacity(max_model_len)
    if isinstance(kv_format, KVarN):
        context += kv_format.group * kvarn.chunk_pages(step_tokens, sequences, kv_format.group)
    return context


def page_size(kv: KV) -> int:
    """Tokens per page."""
    if isinstance(kv, KVarNKV):
        return kv.group
    return kv.words.shape[4] if isinstance(kv, Int8KV | Fp8KV) else kv.shape[4]


def has_scales(kv_format: KVFormat) -> bool:
    """Whether caches of the format have scales that are set before they are used."""
    return isinstance(kv_format, Fp8)


def with_scales(kv: KV, scales: ArrayLike) -> KV:
    """An empty cache of a format that `has_scales` with these, float32 [layers, kv_heads, 2].

    A magnitude of 448 times its scale is the largest that fits; keys, then values.
    """
    assert isinstance(kv, Fp8KV)
    return kv._replace(scales=jnp.asarray(scales, jnp.float32))


def largest_magnitudes(kv: KV) -> Array:
    """What scales are found by: see `eight_bit.reference.largest_magnitudes`."""
    assert isinstance(kv, Fp8KV)
    return eight_bit.largest_magnitudes(kv)


def end_step(kv: KV, step: AttentionStep, *, tile_size: int, target: Target) -> KV:
    """What is left to do in the cache when all layers have attended."""
    return (
        kvarn.end_step(kv, step, tile_size=tile_size, target=target)
        if isinstance(kv, KVarNKV)
        else kv
    )
