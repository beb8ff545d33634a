"""The prologue of attention and the gates of its result: picks the implementations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs.reference import HeadWeights
from jaxserve_kernels.attention_prologue import reference
from jaxserve_kernels.attention_prologue.reference import PrologueHeads
from jaxserve_kernels.op import NOT_PDL, Implementation, Op, Refusal, anything
from jaxserve_kernels.target import Target


def attention_prologue(
    projected: Array,
    weights: HeadWeights,
    tables: tuple[Array, Array],
    *,
    heads: PrologueHeads,
    eps: float,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, Array | None]:
    """See `reference.attention_prologue`."""
    name = jnp.dtype(dtype).name
    return _PROLOGUE(projected, weights, tables, heads=heads, eps=eps, dtype=name, target=target)


def gate_heads(x: Array, gate: Array, *, target: Target) -> Array:
    """See `reference.gate_heads`."""
    return _GATE(x, gate, target=target)


def _configure(*_: Any, heads: PrologueHeads, target: Target, **__: Any) -> Refusal | None:
    """Refuses calls outside a PDL chain: there XLA compiles each definition to one or two kernels.
    A PDL chain cannot contain XLA's kernels."""
    if not target.uses_triton() or not target.pdl:
        return NOT_PDL
    return Refusal("head_dim not a power of 2") if heads.head_dim & (heads.head_dim - 1) else None


def _on_pdl(*_: Any, target: Target) -> Refusal | None:
    return None if target.uses_triton() and target.pdl else NOT_PDL


def _kernel(_: None, *args: Any, **options: Any) -> Any:
    from jaxserve_kernels.attention_prologue import triton  # needs Triton: only for GPUs

    return triton.attention_prologue(*args, **options)


def _gate_kernel(_: None, *args: Any, target: Target) -> Any:
    from jaxserve_kernels.attention_prologue import triton  # needs Triton: only for GPUs

    return triton.gate_heads(*args, target=target)


def _definition(_: None, *args: Any, target: Target, **options: Any) -> Any:
    return reference.attention_prologue(*args, **options)


def _define_gate(_: None, x: Array, gate: Array, *, target: Target) -> Array:
    return reference.gate_heads(x, gate)


_PROLOGUE = Op(
    name="attention_prologue",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda projected, *_, **__: f"tokens of {projected.shape[-1]}",
)
_GATE = Op(
    name="gate_heads",
    implementations=(
        Implementation(name="triton", configure=_on_pdl, run=_gate_kernel),
        Implementation(name="reference", configure=anything, run=_define_gate, kernels=False),
    ),
    describe=lambda x, *_, **__: f"tokens of {x.shape[-1]}",
)
