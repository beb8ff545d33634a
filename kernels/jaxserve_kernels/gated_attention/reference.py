"""The definitions of the prologue and of the gating, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.add_rms_norm.reference import rms_norm
from jaxserve_kernels.attention_inputs.reference import HeadWeights, rope
from jaxserve_kernels.dense_matmul.reference import sum_parts


class PrologueHeads(NamedTuple):
    """Heads of a layer's attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    """Whether the projection has a gate after each query head."""

    @property
    def q_size(self) -> int:
        """Elements of a token's queries."""
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim


def attention_prologue(
    projected: Array,
    weights: HeadWeights,
    tables: tuple[Array, Array],
    *,
    heads: PrologueHeads,
    eps: float,
    dtype: str,
) -> tuple[Array, Array | None]:
    """Bias, QK-norm, RoPE and gates of a step's tokens::

        q, gate = split each head of q                        # with gates
        q, k = rope(rms_norm(q)), rope(rms_norm(k))           # rope: of the first elements

    Args:
      projected: [parts, tokens, q_size * (1 + gated) + 2 * kv_size], partial sums.
      weights, tables, eps: as in `attention_inputs`. tables are [tokens, rotated / 2], for the
        first `rotated` elements of each head.
      dtype: name of the activations' dtype.

    Returns:
      Queries, keys and values [1, tokens, q_size + 2 * kv_size], and gates [tokens, q_size] or
      None.
    """
    tokens, head_dim = projected.shape[1], heads.head_dim
    summed = sum_parts(projected, dtype, weights.bias)
    q, k, v = jnp.split(summed, [summed.shape[-1] - 2 * heads.kv_size, -heads.kv_size], -1)
    q, gate = q.reshape(tokens, heads.q_heads, -1), None
    if heads.gated:
        q, gate = jnp.split(q, 2, axis=-1)
        gate = gate.reshape(tokens, -1)
    k = k.reshape(tokens, -1, head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)
    rotated = [_rotated(each, tables).reshape(tokens, -1) for each in (q, k)]
    return jnp.concatenate([*rotated, v], axis=-1)[None], gate


def _rotated(heads: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates the first elements of each head, as many as tables have angles for."""
    count = 2 * tables[0].shape[-1]
    turned = rope(heads[..., :count], *tables)
    return turned if count == heads.shape[-1] else jnp.concatenate([turned, heads[..., count:]], -1)


def gate_heads(x: Array, gate: Array) -> Array:
    """x * sigmoid(gate). Both are [tokens, q_size] of one dtype. The sigmoid is rounded to it."""
    return x * jax.nn.sigmoid(gate)
