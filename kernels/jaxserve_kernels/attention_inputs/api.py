"""Bias + QK-norm + RoPE + KV write: picks the implementation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import reference
from jaxserve_kernels.attention_inputs.reference import HeadWeights, KVSlots
from jaxserve_kernels.op import Implementation, Op, anything, on_kernels
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
    return _OP(
        qkv, kv, heads, tables, slots, layer=layer, eps=eps, dtype=jnp.dtype(dtype), target=target
    )


def _kernel(_: None, qkv: Array, kv: Array, *rest: Any, layer: int, **options: Any) -> Any:
    from jaxserve_kernels.attention_inputs import triton  # needs Triton: only for GPUs

    return triton.attention_inputs(qkv, kv, layer, *rest, **options)


def _definition(
    _: None, qkv: Array, kv: Array, *rest: Any, layer: int, target: Target, **options: Any
) -> Any:
    return reference.attention_inputs(qkv, kv, layer, *rest, **options)


_OP = Op(
    name="attention_inputs",
    implementations=(
        Implementation(name="triton", configure=on_kernels, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda qkv, *_, **__: f"tokens of {qkv.shape[-1]}",
    per_layer=True,
)
