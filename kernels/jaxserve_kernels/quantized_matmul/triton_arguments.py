"""What kernels are given of a quantised weight: its arrays, and which kind of weight it is."""

from __future__ import annotations

import triton.language as tl
from jax import Array

from jaxserve_kernels.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    QuantizedWeight,
)

INT8: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)  # from here on: 4-bit codes
NVFP4: tl.constexpr = tl.constexpr(3)
MXFP4: tl.constexpr = tl.constexpr(4)

NO_ZERO: tl.constexpr = tl.constexpr(0)
ZERO: tl.constexpr = tl.constexpr(1)


def arrays(weight: QuantizedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales, and zero points or scales per row; where there are none, any array."""
    match weight:
        case Int4Weight(packed, scale, zero):
            return packed, scale, scale if zero is None else zero
        case Nvfp4Weight(packed, scale, row_scale):
            return packed, scale, row_scale
        case _:
            return weight.packed, weight.scale, weight.scale


def kind(weight: QuantizedWeight) -> dict[str, int]:
    match weight:
        case Int4Weight(zero=zero):
            kind = NO_ZERO if zero is None else ZERO
            return {"KIND": INT4.value, "GROUP": weight.group, "ZERO": kind.value}
        case Int8Weight() | Fp8Weight():
            kind = INT8 if isinstance(weight, Int8Weight) else FP8
            return {"KIND": kind.value, "GROUP": weight.group, "ZERO": 0}
        case Nvfp4Weight():
            return {"KIND": NVFP4.value, "GROUP": 16, "ZERO": 0}
        case Mxfp4Weight():
            return {"KIND": MXFP4.value, "GROUP": 32, "ZERO": 0}
