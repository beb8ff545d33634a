"""Residual add and RMSNorm: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.add_rms_norm import reference


def add_rms_norm(x: Array, update: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See `reference.add_rms_norm`."""
    if target.current().implementation == "reference":
        return reference.add_rms_norm(x, update, weight, eps)
    from jaxserve_kernels.add_rms_norm import triton  # needs Triton: only for GPUs

    return triton.add_rms_norm(x, update, weight, eps)
