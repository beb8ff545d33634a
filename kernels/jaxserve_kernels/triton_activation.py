"""Gating in registers: the activations of `activation.py`, in Triton and in Gluon.

GATED is a value of `activation.gating`. Both activations are x times a sigmoid; they differ in the
sigmoid's argument, which is x itself for SiLU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_GELU_TANH = tl.constexpr(2)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, GATED: tl.constexpr):
    """activation(gate) * up in `dtype`, from float32 sums, rounded where the reference rounds."""
    gate = gate.to(dtype).to(tl.float32)
    if GATED == _GELU_TANH:
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    return (active.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@gluon.jit
def sigmoid_of(gate, GATED: gl.constexpr):
    """The argument of the sigmoid by which `gate`, float32, is multiplied."""
    if GATED == _GELU_TANH:  # 0.5 * (1 + tanh(x)) is the sigmoid of 2 x; here 2 * sqrt(2 / pi)
        gate = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate


@gluon.jit
def gated_sums(gate, up, dtype: gl.constexpr, GATED: gl.constexpr):
    """Like `gated`, but with a float32 result, for callers that round when they store."""
    gate = gate.to(dtype).to(gl.float32)
    active = gate / (1.0 + gl.exp2(sigmoid_of(gate, GATED) * -1.4426950408889634))
    return active.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
