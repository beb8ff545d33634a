"""Copies between a cache's array and a ring's, and within an array: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.op import Implementation, Op, anything, on_kernels
from jaxserve_kernels.ring_copies import reference
from jaxserve_kernels.target import Target


def from_ring(pages: Array, ring: Array, pairs: Array, *, axis: int, target: Target) -> Array:
    """See `reference.from_ring`."""
    return _FROM_RING(pages, ring, pairs, axis=axis, target=target)


def to_ring(pages: Array, ring: Array, pairs: Array, *, axis: int, target: Target) -> Array:
    """See `reference.to_ring`."""
    return _TO_RING(pages, ring, pairs, axis=axis, target=target)


def within(pages: Array, pair: Array, *, axis: int, target: Target) -> Array:
    """See `reference.within`."""
    return _WITHIN(pages, pair, axis=axis, target=target)


def _op(name: str, function: str) -> Op:
    def kernel(_: None, *args: Array, axis: int, target: Target) -> Any:
        from jaxserve_kernels.ring_copies import triton  # needs Triton: only for GPUs

        return getattr(triton, function)(*args, axis=axis, target=target)

    def definition(_: None, *args: Array, axis: int, target: Target) -> Any:
        return getattr(reference, function)(*args, axis=axis)

    return Op(
        name=name,
        implementations=(
            Implementation(name="triton", configure=on_kernels, run=kernel),
            Implementation(name="reference", configure=anything, run=definition, kernels=False),
        ),
        describe=lambda *arrays, **_: f"{arrays[-1][0].size} pages",
    )


_FROM_RING = _op("copy_from_ring", "from_ring")
_TO_RING = _op("copy_to_ring", "to_ring")
_WITHIN = _op("copy_within", "within")
