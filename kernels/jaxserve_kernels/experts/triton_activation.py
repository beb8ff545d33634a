"""Gating of experts in registers, in Triton and in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.types import SWIGLU_OSS_ALPHA, SWIGLU_OSS_LIMIT
from jaxserve_kernels.triton_activation import gated, gated_sums, rounded, sigmoid

OSS = gl.constexpr(3)
"""GATED of gpt-oss's activation, beside the values of `activation.gating`."""
_ALPHA = gl.constexpr(SWIGLU_OSS_ALPHA)
_LIMIT = gl.constexpr(SWIGLU_OSS_LIMIT)


@triton.jit
def activated(gate, up, dtype: tl.constexpr, GATED: tl.constexpr):
    """`reference.swiglu_oss` or `gated`, in `dtype`."""
    if GATED == OSS:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), _LIMIT)
        up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -_LIMIT), _LIMIT)
        values = ((up + 1.0) * gate * tl.sigmoid(_ALPHA * gate)).to(dtype)
    else:
        values = gated(gate, up, dtype, GATED)
    return values


@gluon.jit
def activated_sums(gate, up, dtype: gl.constexpr, GATED: gl.constexpr):
    """Like `activated`, two numbers at a time."""
    if GATED == OSS:
        gate = gl.minimum(rounded(gate, dtype), _LIMIT)
        up = gl.minimum(gl.maximum(rounded(up, dtype), -_LIMIT), _LIMIT)
        values = ((up + 1.0) * gate * sigmoid(gate * _ALPHA)).to(dtype)
    else:
        values = gated_sums(gate, up, dtype, GATED)
    return values
