"""Bias + QK-norm + RoPE + KV write: picks the implementation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import reference
from jaxserve_kernels.attention_inputs.reference import HeadWeights, KVSlots
from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.target import Target


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
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.attention_inputs`."""
    heads.check()
    if target.uses_triton():
        from jaxserve_kernels.attention_inputs import triton  # needs Triton: only for GPUs

        def kernels(qkv: Array, kv: Array, *rest: Any) -> Any:
            return triton.attention_inputs(
                qkv, kv, layer, *rest, eps=eps, dtype=dtype, target=target
            )

        args = (qkv, kv, heads, tables, slots)
        if compiles(
            "attention_inputs", kernels, *args, static=(eps, jnp.dtype(dtype)), target=target
        ):
            return kernels(*args)
    return reference.attention_inputs(qkv, kv, layer, heads, tables, slots, eps=eps, dtype=dtype)
