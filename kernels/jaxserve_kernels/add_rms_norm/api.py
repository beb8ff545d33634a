"""Residual add and RMSNorm: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.add_rms_norm import reference
from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, TokenFormat
from jaxserve_kernels.target import Target


def add_rms_norm(
    x: Array,
    update: Array | None,
    weight: Array,
    eps: float,
    form: TokenFormat | None = None,
    *,
    target: Target,
) -> tuple[Array, Array | QuantizedTokens]:
    """See `reference.add_rms_norm`.

    Args:
      update: None if it is in x already (`matmul.add_linear`).
      form: what the normed tokens become, for a reader that takes 8 bits (`matmul.token_format`,
        which asks for it only where there are kernels). Both are the same as one after the other.
    """
    if update is None:  # XLA's fusion reads and writes each token once
        return x, reference.rms_norm(x, weight, eps)
    if target.uses_triton():
        from jaxserve_kernels.add_rms_norm import triton  # needs Triton: only for GPUs

        def kernel(x: Array, update: Array, weight: Array) -> Any:
            return triton.add_rms_norm(x, update, weight, eps, form, target=target)

        if compiles("add_rms_norm", kernel, x, update, weight, static=(eps, form), target=target):
            return kernel(x, update, weight)
    return reference.add_rms_norm(x, update, weight, eps)  # a product takes plain tokens, too
