"""Parts of `triton_streaming.py`: what a program multiplies."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DOWN = gl.constexpr(0)
"""GATED of the down product; beside the values of `activation.gating` and `OSS`."""


@gluon.jit
def block_of(
    block, ends_ptr, experts: gl.constexpr, TOKENS: gl.constexpr, EXPERTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A block's expert, its first pair in expert order, and the end of the expert's pairs.

    `experts` or more as the expert: the block has no pairs. Every warp has all experts.
    """
    lane = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0]))
    there = lane < experts
    ends = gl.load(ends_ptr + lane, mask=there, other=0)
    begins = gl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
    blocks = (ends - begins + TOKENS - 1) // TOKENS
    last = gl.cumsum(blocks, axis=0)
    expert = gl.sum((last <= block).to(gl.int32), axis=0)
    mine = lane == expert
    first = begins + (block - last + blocks) * TOKENS
    begin = gl.sum(gl.where(mine, first, 0), axis=0)
    end = gl.sum(gl.where(mine, ends, 0), axis=0)
    return expert, begin, end


@gluon.jit
def row_of(lane, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr):
    """The weight rows of the program's lanes: which 64 rows, and which of these.

    Past the last row they are other rows. Gated, every 8 rows of gate are followed by the same 8 of
    up, so that a thread holds the sums of both.
    """
    if GATED == DOWN:
        first = gl.program_id(0) * (ROWS // 64)
        block = gl.minimum(first + lane // 64, n // 64 - 1)
        inner = lane % 64
    else:
        gl.static_assert(ROWS == 128)
        block = gl.program_id(0) + lane // 8 % 2 * (n // 64)
        inner = lane // 16 * 8 + lane % 8
    return block, inner


@gluon.jit
def token_of(
    order_ptr, begin, end, shared, tokens, choices: gl.constexpr, GATED: gl.constexpr,
    SHARED: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The rows of x that are the program's tokens, and whether they are there. Down reads rows in
    expert order."""
    place = begin + gl.arange(0, TOKENS, layout)
    token = place
    if GATED != DOWN:
        routed = place < end
        if SHARED > 0:
            routed = routed & (not shared)
        token = gl.load(order_ptr + place, mask=routed, other=0) // choices
        if SHARED > 0:
            token = gl.where(shared, place - tokens * choices, token)
    return token, place < end
