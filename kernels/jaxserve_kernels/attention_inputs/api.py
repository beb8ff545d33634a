"""QK-norm + RoPE + KV write: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.attention_inputs import reference
from jaxserve_kernels.attention_inputs.reference import KVSlots


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
    if not target.uses_triton():
        return reference.attention_inputs(qkv, kv, layer, norms, tables, slots, eps=eps)
    from jaxserve_kernels.attention_inputs import triton  # needs Triton: only for GPUs

    return triton.attention_inputs(qkv, kv, layer, norms, tables, slots, eps=eps)
