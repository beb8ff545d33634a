"""The sum with a shared expert: picks the implementation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.op import NOT_PDL, Implementation, Op, Refusal, anything
from jaxserve_kernels.shared_expert import reference
from jaxserve_kernels.target import Target


def add_shared_expert(
    update: Array, shared: Array, scores: Array, *, column: int, dtype: DTypeLike, target: Target
) -> Array:
    """See `reference.add_shared_expert`."""
    name = jnp.dtype(dtype).name
    return _OP(update, shared, scores, column=column, dtype=name, target=target)


def _configure(*_: Any, target: Target, **__: Any) -> Refusal | None:
    """Refuses calls outside a PDL chain: there XLA compiles the definition to one kernel. A PDL
    chain cannot contain XLA's kernels."""
    return None if target.uses_triton() and (target.pdl or target.joined) else NOT_PDL


def _kernel(_: None, *args: Any, **options: Any) -> Any:
    from jaxserve_kernels.shared_expert import triton  # needs Triton: only for GPUs

    return triton.add_shared_expert(*args, **options)


def _definition(_: None, *args: Any, target: Target, **options: Any) -> Any:
    return reference.add_shared_expert(*args, **options)


_OP = Op(
    name="add_shared_expert",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda update, *_, **__: f"tokens of {update.shape[-1]}",
)
