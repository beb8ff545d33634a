"""Kernel arguments of a quantised weight: its arrays, and constants of its format."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from jax import Array

from jaxserve_kernels.weights import Kind, Operand, Quantized

OTHER: tl.constexpr = tl.constexpr(Kind.OTHER.value)
INT8: tl.constexpr = tl.constexpr(Kind.INT8.value)
FP8: tl.constexpr = tl.constexpr(Kind.FP8.value)
INT4: tl.constexpr = tl.constexpr(Kind.INT4.value)
NVFP4: tl.constexpr = tl.constexpr(Kind.NVFP4.value)
MXFP4: tl.constexpr = tl.constexpr(Kind.MXFP4.value)

NO_ZERO: tl.constexpr = tl.constexpr(0)
ZERO: tl.constexpr = tl.constexpr(1)


def operand_of(weight: Quantized) -> Operand:
    """The weight's operand. The weight must be one that a kernel was chosen for."""
    operand = weight.operand
    assert operand is not None, f"no kernel knows {type(weight)}"
    return operand


def arrays(weight: Quantized) -> tuple[Array, Array, Array]:
    """See `weights.Operand.arrays`."""
    return operand_of(weight).arrays


def kind(weight: Quantized) -> dict[str, Any]:
    """See `weights.Operand.constants`."""
    return operand_of(weight).constants
