"""What comes between the projection of attention and its kernels in some models, in plain JAX:
gates, RoPE of a part of each head, norms with weights in float32.

The kernels then get queries and keys that are normed and rotated already, so every KV format and
every kernel serves such models.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.layer_spec import AttentionSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.rope import RopeTables
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights, rope
from jaxserve_kernels.matmul import sum_parts


class Prologue(NamedTuple):
    """What attention takes in place of the projection."""

    qkv: Array  # [1, tokens, q_size + 2 * kv_size]
    tables: RopeTables
    """That rotate nothing."""
    gate: Array | None  # [tokens, q_size]


def is_needed(spec: ModelSpec) -> bool:
    """Returns whether attention's kernels cannot do all that a model asks before attention."""
    attention = spec.attention
    return attention.gated or attention.rope.fraction < 1 or spec.zero_centred_norms


def prologue(
    projected: Array,
    heads: HeadWeights,
    tables: RopeTables,
    attention: AttentionSpec,
    *,
    eps: float,
    dtype: DTypeLike,
) -> Prologue:
    """Bias, QK-norm, RoPE and gates of a step's tokens::

        q, gate = split each head of q                        # with gates
        q, k = rope(rms_norm(q)), rope(rms_norm(k))           # rope: of the first elements

    Args:
      projected: [parts, tokens, qkv_size], partial sums.
      heads, tables, eps: as of `attention_inputs`; tables [tokens, rotated / 2].
      dtype: of activations.
    """
    tokens, head_dim = projected.shape[1], attention.head_dim
    summed = sum_parts(projected, dtype, heads.bias)
    q, k, v = jnp.split(summed, [summed.shape[-1] - 2 * attention.kv_size, -attention.kv_size], -1)
    q, gate = q.reshape(tokens, attention.q_heads, -1), None
    if attention.gated:
        q, gate = jnp.split(q, 2, axis=-1)
        gate = gate.reshape(tokens, -1)
    k = k.reshape(tokens, -1, head_dim)
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = rms_norm(q, heads.q_norm, eps), rms_norm(k, heads.k_norm, eps)
    rotated = [_rotated(each, tables).reshape(tokens, -1) for each in (q, k)]
    ones = jnp.ones((tokens, head_dim // 2), jnp.float32)
    qkv = jnp.concatenate([*rotated, v], axis=-1)
    return Prologue(qkv[None], RopeTables(ones, jnp.zeros_like(ones)), gate)


def _rotated(heads: Array, tables: RopeTables) -> Array:
    """The first elements of each head rotated, the others as they are."""
    count = 2 * tables.cos.shape[-1]
    turned = rope(heads[..., :count], *tables)
    return turned if count == heads.shape[-1] else jnp.concatenate([turned, heads[..., count:]], -1)
