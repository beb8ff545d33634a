"""What the products of `triton.py` have in common: which tokens a program has, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.quantized_matmul.triton import accumulate

PLAIN = tl.constexpr(-2)
"""In place of a `weights.Kind`: the weight is an array."""


@triton.jit
def block_of(
    ids_ptr, ends_ptr, pairs, experts: tl.constexpr, ONE: tl.constexpr, FEW: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The program's expert, and from where to where its tokens lie, at most TOKENS of which are the
    program's; an expert beyond the last: there are none. ONE: of one token, each pair is alone.
    FEW: of at most so many pairs, which every program counts as `triton_route.order` does more."""
    block = tl.program_id(1)
    if ONE:
        expert = tl.load(ids_ptr + block)
        begin = block
        end = block + 1
    else:
        lane = tl.arange(0, EXPERTS)
        there = lane < experts
        if FEW > 0:
            ids = _few_ids(ids_ptr, pairs, FEW)
            counts = tl.sum((ids[None, :] == lane[:, None]).to(tl.int32), axis=1)
            ends = tl.cumsum(counts, axis=0)
            begins = ends - counts
        else:
            ends = tl.load(ends_ptr + lane, mask=there, other=0)
            begins = tl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
        blocks = tl.where(there, (ends - begins + TOKENS - 1) // TOKENS, 0)
        last = tl.cumsum(blocks, axis=0)
        expert = tl.sum((last <= block).to(tl.int32), axis=0)
        mine = lane == expert
        first = begins + (block - last + blocks) * TOKENS
        begin = tl.sum(tl.where(mine, first, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
    return expert, begin, end


@triton.jit
def _few_ids(ids_ptr, pairs, FEW: tl.constexpr):
    """Of so many pairs; from `pairs` on there is none, which is no expert's."""
    pair = tl.arange(0, FEW)
    return tl.load(ids_ptr + pair, mask=pair < pairs, other=2147483647)


@triton.jit
def pairs_at(
    ids_ptr, order_ptr, pairs, expert, place, end, ONE: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """The pairs of an expert at `place`; from `end` on, where its last one is, there is none: 0."""
    if ONE:
        pair = place
    elif FEW > 0:
        ids = _few_ids(ids_ptr, pairs, FEW)
        mine = (ids == expert).to(tl.int32)
        after = end - tl.sum(mine, axis=0) + tl.cumsum(mine, axis=0) - 1
        lane = tl.arange(0, FEW)
        found = (mine > 0)[None, :] & (after[None, :] == place[:, None])
        pair = tl.sum(tl.where(found, lane[None, :], 0), axis=1)
    else:
        pair = tl.load(order_ptr + place, mask=place < end, other=0)
    return pair


@triton.jit
def within(row, n: tl.constexpr, size: tl.constexpr):
    """Rows of a tile of `size`; past the last of n rows, that one."""
    if n % size:
        row = tl.minimum(row, n - 1)
    return row


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
