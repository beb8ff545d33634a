"""Products with quantised weights."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul import reference
from jaxserve_kernels.weights import QuantizedWeight


def linear(x: Array, weight: QuantizedWeight, dtype: DTypeLike | None = None) -> Array:
    """See `matmul.linear`."""
    return reference.linear(x, weight, dtype or x.dtype)


def gated_linear(x: Array, weight: QuantizedWeight) -> Array:
    """See `matmul.gated_linear`."""
    return reference.gated_linear(x, weight)
