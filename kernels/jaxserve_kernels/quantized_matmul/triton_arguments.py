"""What kernels are given of a quantised weight: its arrays, and which kind of weight it is."""

from __future__ import annotations

import triton.language as tl
from jax import Array

from jaxserve_kernels.weights import Kind, QuantizedWeight

OTHER: tl.constexpr = tl.constexpr(Kind.OTHER.value)
INT8: tl.constexpr = tl.constexpr(Kind.INT8.value)
FP8: tl.constexpr = tl.constexpr(Kind.FP8.value)
INT4: tl.constexpr = tl.constexpr(Kind.INT4.value)
NVFP4: tl.constexpr = tl.constexpr(Kind.NVFP4.value)
MXFP4: tl.constexpr = tl.constexpr(Kind.MXFP4.value)

NO_ZERO: tl.constexpr = tl.constexpr(0)
ZERO: tl.constexpr = tl.constexpr(1)


def arrays(weight: QuantizedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales, and zero points or scales per row; where there are none, any array."""
    return weight.kernel_arrays


def kind(weight: QuantizedWeight) -> dict[str, int]:
    """Constants of kernels: see `weights.Quantized.kernel_constants`."""
    return weight.kernel_constants
