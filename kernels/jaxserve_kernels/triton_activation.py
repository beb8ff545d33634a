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
def _argument(gate, GATED: gl.constexpr):
    """The argument of the sigmoid by which `gate`, float32, is multiplied."""
    if GATED == _GELU_TANH:  # 0.5 * (1 + tanh(x)) is the sigmoid of 2 x; here 2 * sqrt(2 / pi)
        gate = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate


@gluon.jit
def gated_sums(gate, up, dtype: gl.constexpr, GATED: gl.constexpr):
    """Like `gated`, two numbers at a time."""
    gate = rounded(gate, dtype)
    return product(gate * sigmoid(_argument(gate, GATED)), up, dtype)


@gluon.jit
def product(a, b, dtype: gl.constexpr):
    """The product of float32 values that are rounded to `dtype`, in `dtype`."""
    if dtype == gl.bfloat16:
        values = gl.inline_asm_elementwise(
            """{ .reg .b32 a, b, zero; cvt.rn.bf16x2.f32 a, $2, $1; cvt.rn.bf16x2.f32 b, $4, $3;
            mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, a, b, zero; }""",
            "=r,f,f,f,f", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = (a.to(dtype).to(gl.float32) * b.to(dtype).to(gl.float32)).to(dtype)
    return values


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32, with an error of some units in the last place."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 e; mul.f32 e, $1, 0fbfb8aa3b; ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3f800000; rcp.approx.ftz.f32 $0, e; }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def rounded(values, dtype: gl.constexpr):
    """float32 values rounded to `dtype`, two bfloat16 at a time. The compiler converts a single one
    in the unit for exponentials, which has a quarter of the rate."""
    if dtype == gl.bfloat16:
        values = gl.inline_asm_elementwise(
            """{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }""",
            "=f,=f,f,f", [values], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = values.to(dtype).to(gl.float32)
    return values
