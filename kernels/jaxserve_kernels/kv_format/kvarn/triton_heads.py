"""The rotation of heads, which is its own inverse.

A head is four quarters [rows, quarter], with a quarter's 32 channels in the lanes of a warp. The
Hadamard matrix of 128 is the Kronecker product of those of 4 and 32, so the rotation needs only
warp shuffles and sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _transformed(x):
    """x [rows, 32] times the unnormalised Hadamard matrix. A row is in the lanes of a warp."""
    layout: gl.constexpr = x.type.layout
    dim = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    for bit in gl.static_range(5):
        other = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r",
            [x, gl.full(x.shape, 1 << bit, gl.int32, layout)],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        sign = gl.where((dim & (1 << bit)) != 0, -1.0, 1.0)
        x = x * gl.expand_dims(sign, 0) + other
    return x


@gluon.jit
def rotated(x0, x1, x2, x3):
    """Rotates heads given as four quarters [rows, quarter]. The result is bfloat16."""
    norm: gl.constexpr = (4 * x0.shape[1]) ** -0.5
    x0 = _transformed(x0) * norm
    x1 = _transformed(x1) * norm
    x2 = _transformed(x2) * norm
    x3 = _transformed(x3) * norm
    a = x0 + x1
    b = x0 - x1
    c = x2 + x3
    d = x2 - x3
    return (
        (a + c).to(gl.bfloat16), (b + d).to(gl.bfloat16),
        (a - c).to(gl.bfloat16), (b - d).to(gl.bfloat16),
    )  # fmt: skip


@gluon.jit
def store_heads(target, x0, x1, x2, x3, mask):
    """Stores four quarters [rows, quarter] of heads one after another at `target`."""
    target += gl.expand_dims(gl.arange(0, x0.shape[1], gl.SliceLayout(0, x0.type.layout)), 0)
    gl.store(target, x0, mask=mask)
    gl.store(target + x0.shape[1], x1, mask=mask)
    gl.store(target + 2 * x0.shape[1], x2, mask=mask)
    gl.store(target + 3 * x0.shape[1], x3, mask=mask)
