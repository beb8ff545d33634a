"""What the products of `triton.py` have in common: which tokens a program has, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.quantized_matmul.triton import accumulate

PLAIN = tl.constexpr(-2)
"""In place of a `weights.Kind`: the weight is an array."""


@triton.jit
def block_of(
    ids_ptr, ends_ptr, experts: tl.constexpr, ONE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The program's expert, and from where to where its tokens lie, at most TOKENS of which are the
    program's; an expert beyond the last: there are none. ONE: of one token, each pair is alone."""
    block = tl.program_id(1)
    if ONE:
        expert = tl.load(ids_ptr + block)
        begin = block
        end = block + 1
    else:
        lane = tl.arange(0, EXPERTS)
        there = lane < experts
        ends = tl.load(ends_ptr + lane, mask=there, other=0)
        begins = tl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
        blocks = (ends - begins + TOKENS - 1) // TOKENS
        last = tl.cumsum(blocks, axis=0)
        expert = tl.sum((last <= block).to(tl.int32), axis=0)
        mine = lane == expert
        first = begins + (block - last + blocks) * TOKENS
        begin = tl.sum(tl.where(mine, first, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
    return expert, begin, end


@triton.jit
def within(row, n: tl.constexpr, size: tl.constexpr):
    """Rows of a tile of `size`; past the last of n rows, that one."""
    if n % size:
        row = tl.minimum(row, n - 1)
    return row


@triton.jit
def token_of(order_ptr, place, end, tokens, choices: tl.constexpr, ONE: tl.constexpr):
    """Of the pairs at `place`; from `end` on there is none, which is the token after the last."""
    if ONE:
        token = tl.where(place < end, 0, tokens)
    else:
        pair = tl.load(order_ptr + place, mask=place < end, other=0)
        token = tl.where(place < end, pair // choices, tokens)
    return token


@triton.jit
def _plain(
    x_ptr, w_ptr, row, source, tail_source, sources, up: tl.constexpr,
    k: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `row` of a plain weight times the tokens in the rows `source` and, with TAIL,
    `tail_source` of x; and if `up` is not 0 the rows so far behind, which are accumulated apart."""
    depth = tl.arange(0, DEPTH)
    w = w_ptr + row.to(tl.int64)[:, None] * k + depth[None, :]
    x = x_ptr + source.to(tl.int64)[None, :] * k + depth[:, None]
    tail_x = x_ptr + tail_source.to(tl.int64)[None, :] * k + depth[:, None]
    present = source[None, :] < sources
    tail_present = tail_source[None, :] < sources
    acc = tl.zeros([row.shape[0], source.shape[0]], tl.float32)
    acc_up = acc
    tail = tl.zeros([row.shape[0], tail_source.shape[0]], tl.float32)
    tail_up = tail
    for _ in tl.range(0, k // DEPTH, num_stages=STAGES):
        a = tl.load(w)
        b = tl.load(x, mask=present, other=0.0)
        acc = tl.dot(a, b, acc)
        if up > 0:
            a_up = tl.load(w + up * k)
            acc_up = tl.dot(a_up, b, acc_up)
        if TAIL > 0:
            c = tl.load(tail_x, mask=tail_present, other=0.0)
            tail = tl.dot(a, c, tail)
            if up > 0:
                tail_up = tl.dot(a_up, c, tail_up)
            tail_x += DEPTH
        w += DEPTH
        x += DEPTH
    return acc, acc_up, tail, tail_up


@triton.jit
def sums(
    x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, source, tail_source, sources,
    up: tl.constexpr, k: tl.constexpr, columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, UNPACK: tl.constexpr,
    TAIL: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An expert's rows `row` times the tokens in the rows `source` of x, of which there are
    `sources`; beyond that tokens are 0. What else `_plain` gives, a quantised weight has not."""
    expert = expert.to(tl.int64)
    packed = packed_ptr + expert * packed_size
    if KIND == PLAIN:
        acc, acc_up, tail, tail_up = _plain(
            x_ptr, packed, row, source, tail_source, sources, up, k, TAIL, DEPTH, STAGES
        )
    else:
        tl.static_assert(up == 0)
        tl.static_assert(TAIL == 0)
        acc = accumulate(
            x_ptr, packed, scale_ptr + expert * scale_size, second_ptr + expert * second_size,
            row, source, 0, sources, k // DEPTH, k, columns,
            KIND, GROUP, ZERO, UNROLL, STAGES, UNPACK,
        )  # fmt: skip
        acc_up = acc
        tail = acc
        tail_up = acc
    return acc, acc_up, tail, tail_up
