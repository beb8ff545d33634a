"""Prepares queries and keys for models whose attention needs more than the kernels do: gates, RoPE
on part of a head, norms with float32 weights.

The kernels then get queries and keys that are already normed and rotated, so every KV format and
every kernel serves such models.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import ModelSpec
from jaxserve.models.rope import RopeTables
from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.attention_prologue import PrologueHeads, attention_prologue
from jaxserve_kernels.target import Target


class Prologue(NamedTuple):
    """The inputs of attention in place of the projection."""

    qkv: Array  # [1, tokens, q_size + 2 * kv_size]
    tables: RopeTables
    """Tables that rotate nothing."""
    gate: Array | None  # [tokens, q_size]


def is_needed(spec: ModelSpec) -> bool:
    """Returns whether a model needs more before attention than the attention kernels do."""
    attention = spec.attention
    return attention.gated or attention.rope.fraction < 1 or spec.zero_centred_norms


def prologue(
    projected: Array,
    heads: HeadWeights,
    tables: RopeTables,
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    target: Target,
) -> Prologue:
    """See `attention_prologue.reference`. `dtype`: that of activations."""
    own = spec.attention
    shape = PrologueHeads(own.q_heads, own.kv_heads, own.head_dim, own.gated)
    qkv, gate = attention_prologue(
        projected, heads, tables, heads=shape, eps=spec.norm_eps, dtype=dtype, target=target
    )
    tables_of = _constants if target.pdl else _identity
    return Prologue(qkv, tables_of(projected.shape[1], own.head_dim), gate)


def _identity(tokens: int, head_dim: int, xp: Any = jnp) -> RopeTables:
    ones = xp.ones((tokens, head_dim // 2), xp.float32)
    return RopeTables(ones, xp.zeros_like(ones))


@functools.lru_cache(maxsize=64)
def _constants(tokens: int, head_dim: int) -> RopeTables:
    """Returns tables as numpy constants: nothing may be computed between kernels launched by
    PDL."""
    return _identity(tokens, head_dim, np)
