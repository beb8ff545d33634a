"""QK-norm + RoPE + KV write: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.attention_inputs import reference
from jaxserve_kernels.attention_inputs.reference import KVSlots
from jaxserve_kernels.fallback import compiles


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
    """See `reference.attention_inputs`."""
    if target.uses_triton():
        from jaxserve_kernels.attention_inputs import triton  # needs Triton: only for GPUs

        def kernels(qkv: Array, kv: Array, *rest: Any) -> Any:
            return triton.attention_inputs(qkv, kv, layer, *rest, eps=eps)

        args = (qkv, kv, norms, tables, slots)
        if compiles("attention_inputs", kernels, *args, static=eps):
            return kernels(*args)
    return reference.attention_inputs(qkv, kv, layer, norms, tables, slots, eps=eps)
