"""The definition of bias + QK-norm + RoPE + KV write, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.add_rms_norm.reference import rms_norm
from jaxserve_kernels.dense_matmul.reference import sum_parts


class HeadWeights(NamedTuple):
    """A layer's weights for its heads, beside the projection matrix. None: the model has none."""

    q_norm: Array | None = None
    """[head_dim], the weight of each query head's RMSNorm."""
    k_norm: Array | None = None
    """[head_dim], the weight of each key head's RMSNorm. Models have both norms or neither."""
    bias: Array | None = None
    """[(q_heads + 2 * kv_heads) * head_dim], for queries, keys and values."""
    sinks: Array | None = None
    """[q_heads], an extra score in the softmax whose value vector is 0: see `paged_attention`."""

    @property
    def of_inputs(self) -> tuple[Array | None, Array | None, Array | None]:
        """q_norm, k_norm and bias: arguments of the kernels that make queries, keys and values."""
        return self.q_norm, self.k_norm, self.bias

    def check(self) -> None:
        """Raises ValueError if exactly one of the two norms is given."""
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("queries and keys are both normed or neither is: one norm is missing")


class KVSlots(NamedTuple):
    """Page and offset of each token's key and value, int32 [tokens]. Padding goes to page 0."""

    pages: Array
    offsets: Array


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates x [tokens, heads, head_dim] by the angles of cos and sin [tokens, head_dim/2].

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
    heads: HeadWeights,
    tables: tuple[Array, Array],
    slots: KVSlots,
    *,
    eps: float,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Norms and rotates queries and keys per head, and stores keys and values in their pages::

        q, k, v = split(sum_parts(qkv) + bias)                # heads: q_heads, kv_heads, kv_heads
        q, k = rope(rms_norm(q)), rope(rms_norm(k))           # rope alone without norms
        kv[layer, pages[t], :, :, offsets[t]] = k[t], v[t]

    Args:
      qkv: [parts, tokens, (q_heads + 2 * kv_heads) * head_dim], partial sums of the projection.
      kv: [layers, pages, kv_heads, 2, page_size, head_dim], updated in place when donated.
      layer: index into the first axis of kv.
      heads: the model's norms and bias. The bias is added in float32, before the sum is rounded to
        `dtype`. Parts in a narrower dtype are rounded one time more.
      tables: cosines and sines, float32 [tokens, head_dim/2] each.
      slots: page and offset of each token. Keys and values are rounded to kv's dtype.
      eps: epsilon of the norms.
      dtype: dtype of activations, to which the projection, the norms and the rotation are rounded.

    Returns:
      Queries [tokens, q_heads, head_dim], and kv.

    Raises:
      ValueError: only one of the two norms is given.
    """
    q, k, v = heads_of(qkv, heads, tables, kv_heads=kv.shape[2], eps=eps, dtype=dtype)
    return q, kv_write(kv, layer, k, v, slots.pages, slots.offsets)


def kv_write(
    kv: Array, layer: int, keys: Array, values: Array, pages: Array, offsets: Array
) -> Array:
    """Stores each token's key and value at its page and offset::

        kv[layer, pages[t], :, 0, offsets[t]] = keys[t]
        kv[layer, pages[t], :, 1, offsets[t]] = values[t]

    kv is updated in place when donated. Padding tokens go to page 0, in any order.

    Args:
      kv: [layers, pages, kv_heads, 2, page_size, head_dim].
      layer: index into the first axis of kv.
      keys, values: [tokens, kv_heads, head_dim].
      pages, offsets: int32 [tokens].
    """
    both = jnp.stack([keys, values], axis=2).astype(kv.dtype)
    places = kv.at[layer, pages, :, :, offsets]
    return places.set(both, wrap_negative_indices=False)  # no index is negative


def heads_of(
    qkv: Array,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    *,
    kv_heads: int,
    eps: float,
    dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values, [tokens, heads, head_dim] each, in `dtype`.

    Queries and keys are rotated, and normed if the model has norms. Arguments and errors are those
    of `attention_inputs`.
    """
    heads.check()
    projected = sum_parts(qkv, dtype, heads.bias)
    each = projected.reshape(projected.shape[0], -1, 2 * tables[0].shape[-1])
    q_heads = each.shape[1] - 2 * kv_heads
    q, k, v = jnp.split(each, [q_heads, q_heads + kv_heads], axis=1)
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = rms_norm(q, heads.q_norm, eps), rms_norm(k, heads.k_norm, eps)
    return rope(q, *tables), rope(k, *tables), v
