"""The definition of QK-norm + RoPE + KV write, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.add_rms_norm.reference import rms_norm
from jaxserve_kernels.dense_matmul.reference import sum_parts


class KVSlots(NamedTuple):
    """Where each token's key and value go; int32 [tokens] each. Padding goes to page 0."""

    pages: Array
    offsets: Array


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x [tokens, heads, head_dim] by the angles of cos and sin [tokens, head_dim/2].

    The pairs are (i, i + head_dim/2), as in Hugging Face's Qwen3 (RoFormer, arXiv 2104.09864).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attention_inputs(
    qkv: Array,
    kv: Array,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    slots: KVSlots,
    *,
    eps: float,
) -> tuple[Array, Array]:
    """Norm and rotate queries and keys per head, and store keys and values in their pages::

        q, k, v = split(sum_parts(qkv))                       # heads: q_heads, kv_heads, kv_heads
        q, k = rope(rms_norm(q)), rope(rms_norm(k))
        kv[layer, pages[t], :, :, offsets[t]] = k[t], v[t]

    Args:
      qkv: [parts, tokens, (q_heads + 2 * kv_heads) * head_dim], partial sums of the projection.
      kv: [layers, pages, kv_heads, 2, page_size, head_dim], updated in place when donated.
      layer: index into the first axis of kv.
      norms: weights of the query and key norms, [head_dim] each; their dtype is the activations'.
      tables: cosines and sines, float32 [tokens, head_dim/2] each.
      slots: where keys and values go; they are rounded to kv's dtype, nothing else is.

    Returns:
      Queries [tokens, q_heads, head_dim], and kv.
    """
    q, k, v = heads_of(sum_parts(qkv, norms[0].dtype), norms, tables, kv_heads=kv.shape[2], eps=eps)
    return q, kv_write(kv, layer, k, v, slots.pages, slots.offsets)


def kv_write(
    kv: Array, layer: int, keys: Array, values: Array, pages: Array, offsets: Array
) -> Array:
    """Store each token's key and value at its page and offset::

        kv[layer, pages[t], :, 0, offsets[t]] = keys[t]
        kv[layer, pages[t], :, 1, offsets[t]] = values[t]

    The update happens in place when kv is donated. Tokens of the padding go to page 0, in any
    order.

    Args:
      kv: [layers, pages, kv_heads, 2, page_size, head_dim].
      layer: index into the first axis of kv.
      keys, values: [tokens, kv_heads, head_dim].
      pages, offsets: int32 [tokens].
    """
    both = jnp.stack([keys, values], axis=2).astype(kv.dtype)
    return kv.at[layer, pages, :, :, offsets].set(both)


def heads_of(
    projected: Array,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    *,
    kv_heads: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Queries, keys (both normed and rotated) and values, [tokens, heads, head_dim] each.

    `projected` is [tokens, (q_heads + 2 * kv_heads) * head_dim]; the others as in
    `attention_inputs`.
    """
    heads = projected.reshape(projected.shape[0], -1, norms[0].shape[0])
    q_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = jnp.split(heads, [q_heads, q_heads + kv_heads], axis=1)
    q = rope(rms_norm(q, norms[0], eps), *tables)
    k = rope(rms_norm(k, norms[1], eps), *tables)
    return q, k, v
