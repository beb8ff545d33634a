"""Which inputs planes of 4-bit codes hold, for kernels that give tokens the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.weights import Kind

_MXFP4 = tl.constexpr(Kind.MXFP4.value)


@triton.jit
def of_planes(place, KIND: tl.constexpr):
    """The inputs at places 0..127 of a tile's planes: as in `weights.layout.swap_eights`, also the
    places of inputs."""
    if KIND == _MXFP4:
        place = place // 8 % 4 * 32 + place // 32 * 8 + place % 8
    return place
