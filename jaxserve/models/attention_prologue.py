"""What comes between the projection of attention and its kernels in some models: gates, RoPE of a
part of each head, norms with weights in float32.

The kernels then get queries and keys that are normed and rotated already, so every KV format and
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
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    target: Target,
) -> Prologue:
    """See `attention_prologue.reference`; `dtype` is that of activations."""
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
    """Of numpy: where kernels are launched by PDL, nothing is computed between them."""
    return _identity(tokens, head_dim, np)
