"""A k-step of the streaming products with 4-bit integers and int8 tokens.

The tensor cores multiply codes less 8 with the tokens as integers, exactly. A sum over 128 inputs
is then multiplied by the scales of its row and its token. With bfloat16 tokens eight codes take
nine instructions and four times 16 inputs; here they take three, and twice 32 inputs.

A word's byte has an even plane's nibble in its lower half and the next plane's in its upper half.
So a product takes the lower nibbles of 64 bytes, which are planes 0 and 2 in turn, and another the
upper ones: the tokens are in `Order.BYTES`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP

_NO_ZERO = gl.constexpr(NO_ZERO.value)

SIXTEENTH = gl.constexpr(0.0625)
"""What sums are multiplied by at the end: codes are multiplied as 16 * (code - 8)."""


@gluon.jit
def _less_8(codes):
    """Bytes of two codes each to int8: 16 * (code - 8) of the lower and of the upper halves."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 low, sign; mov.b32 sign, 0x80808080; shl.b32 low, $2, 4;
        lop3.b32 $0, low, 0xf0f0f0f0, sign, 0x6a; lop3.b32 $1, $2, 0xf0f0f0f0, sign, 0x6a; }""",
        "=&r,=r,r", [codes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def add_int8_k_steps(
    acc, words, scales, zeros, inputs, factors, sums, COUNT: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """`add_k_steps` with int8 tokens. `factors`, `sums`: each tile's scale of each token, and the
    sum of its codes, which is read if there are zero points. acc is 16 times the sums."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    row: gl.constexpr = gl.SliceLayout(1, mma)
    token: gl.constexpr = gl.SliceLayout(0, mma)
    in_bytes: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    codes = words.reinterpret(gl.uint8, [words.shape[0], 64], in_bytes)
    nothing = gl.zeros([ROWS, TOKENS], gl.int32, mma)
    for tile in gl.static_range(COUNT):
        low, high = _less_8(codes.slice(tile * ROWS, ROWS).load(left))
        x = inputs.slice(tile * TOKENS, TOKENS)
        first = x.slice(0, 64, dim=1).permute((1, 0))
        second = x.slice(64, 64, dim=1).permute((1, 0))
        if TOKENS > MOST_BY_A_WARP:
            part = warpgroup_mma(low, first, nothing, use_acc=False, is_async=True)
            part = warpgroup_mma(high, second, part, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
        else:
            part = mma_v2(low, first.load(right), nothing)
            part = mma_v2(high, second.load(right), part)
        scale = scales.slice(tile * ROWS, ROWS).load(row)
        factor = factors.slice(tile * TOKENS, TOKENS).load(token)
        values = part.to(gl.float32)
        if ZERO != _NO_ZERO:
            zero = zeros.slice(tile * ROWS, ROWS).load(row).to(gl.float32)
            total = sums.slice(tile * TOKENS, TOKENS).load(token)
            values += (128.0 - 16.0 * zero)[:, None] * total[None, :]
        acc += values * (scale[:, None] * factor[None, :])
    return acc
