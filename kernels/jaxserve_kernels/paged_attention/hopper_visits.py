"""Parts of `hopper.py`: a consumer warpgroup's streamed softmax over the blocks of a context."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_MASKED = gl.constexpr(float("-inf"))
"""Score of a masked key. It must be infinite, because scores are scaled after they are masked. The
exponential uses the exact product with the scale, the peak the rounded one. For a large finite
number the two differ by 1e20 and more, so a row that sees no key of its split would get an infinite
or a zero weight."""

_LEAST = gl.constexpr(-1.0e30)
"""The peak of a row that has seen no key. It is finite, so that -inf minus the peak is -inf, not
NaN."""

WARPGROUP_ROWS = gl.constexpr(64)
"""Query rows of a warpgroup."""


@gluon.jit
def _pinned(x):
    """Returns x, and keeps the compiler from computing it later. Otherwise it would move the
    computation after the wait for the product that it should overlap."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def _softmax(scores, peak, weight, scale: gl.constexpr):
    """Streamed softmax: the weights of these scores, and the factor by which earlier sums
    shrink."""
    new_peak = gl.maximum(peak, gl.max(scores, axis=1) * scale)
    probs = gl.exp2(scores * scale - gl.expand_dims(new_peak, 1))
    shrink = gl.exp2(peak - new_peak)
    return probs, shrink, new_peak, weight * shrink + gl.sum(probs, axis=1)


@gluon.jit
def _visible(key, row_position, WINDOW: gl.constexpr):
    """Which rows see which keys: [rows, keys]. WINDOW: 0 for none."""
    visible = gl.expand_dims(key, 0) <= gl.expand_dims(row_position, 1)
    if WINDOW:
        visible = visible & (gl.expand_dims(key, 0) > gl.expand_dims(row_position, 1) - WINDOW)
    return visible


@gluon.jit
def _at_first(
    sinks_ptr, kv_head, split, group: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The peak and weight of each row before its first key: of the sink of the row's head, which
    the first split counts, or of nothing."""
    peak = gl.full([WARPGROUP_ROWS], _LEAST, gl.float32, layout)
    weight = gl.zeros([WARPGROUP_ROWS], gl.float32, layout)
    if sinks_ptr is not None:
        sink_row = gl.arange(0, WARPGROUP_ROWS, layout)
        has_sink = (sink_row < TOKENS * group) & (split == 0)
        sink = sinks_ptr + kv_head * group + sink_row % group
        sink = gl.load(sink, mask=has_sink, other=0.0).to(gl.float32)
        peak = gl.where(has_sink, sink * 1.4426950408889634, peak)
        weight = gl.where(has_sink, 1.0, weight)
    return peak, weight


@gluon.jit
def first_visit(
    q, sinks_ptr, blocks, ready, base, begin, end, row_position, kv_head, split,
    scale: gl.constexpr, group: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Computes scores and softmax of block `begin`, the program's block number `base`. Returns its
    probabilities [rows, keys], no sums yet [rows, dim], and the peaks and weights [rows]."""
    key = begin * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    zeros = gl.zeros([WARPGROUP_ROWS, KEYS], gl.float32, s_layout)
    limit = base + end - begin
    stage = base % STAGES
    mbarrier.wait(ready.index(stage), (base // STAGES) & 1)
    keys = blocks.index(2 * stage).permute((1, 0))
    scores = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = gl.where(_visible(key, row_position, WINDOW), scores, _MASKED)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    peak, weight = _at_first(sinks_ptr, kv_head, split, group, TOKENS, row_s)
    probs, _, peak, weight = _softmax(scores, peak, weight, scale)
    p = gl.convert_layout(probs.to(gl.bfloat16), gl.DotOperandLayout(0, o_layout, 2))
    acc = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, o_layout)
    after = base + 1
    mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1, pred=after < limit)
    return p, acc, peak, weight


@gluon.jit
def _visit(
    index, block, limit, q, p, acc, peak, weight, blocks, ready, free, row_position,
    scale: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    WINDOW: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Computes scores and softmax of a block, and the weighted values of the previous block.
    `index` counts the program's blocks over all its tiles; this tile's end before `limit`."""
    stage = index % STAGES
    before = (index - 1) % STAGES
    zeros = gl.zeros([WARPGROUP_ROWS, KEYS], gl.float32, s_layout)
    keys = blocks.index(2 * stage).permute((1, 0))
    scores = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    acc_later = warpgroup_mma(p, blocks.index(2 * before + 1), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if MASK:
        key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
        visible = _visible(key, row_position, WINDOW)
        scores = gl.where(visible, scores, _MASKED)
    probs, shrink, peak, weight = _softmax(scores, peak, weight, scale)
    p_next = gl.convert_layout(probs.to(gl.bfloat16), gl.DotOperandLayout(0, o_layout, 2))
    p_next = _pinned(p_next)
    after = index + 1  # wait here: the wait ends the basic block that contains the softmax
    mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1, pred=after < limit)
    acc, p, p_next = warpgroup_mma_wait(0, deps=[acc_later, p, p_next])
    gl.barrier()
    mbarrier.arrive(free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, o_layout)), 1)
    return p_next, acc, peak, weight


@gluon.jit
def more_visits(
    q, p, acc, peak, weight, blocks, ready, free, base, begin, end, full, last, row_position,
    scale: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Visits the blocks after `begin`. Only those that some row does not see in full are masked:
    the blocks from `full` on, and those that the window cuts for the row at position `last`."""
    limit = base + end - begin
    start = begin + 1
    if WINDOW:
        start = gl.maximum(start, gl.minimum(gl.maximum(last - WINDOW, 0) // KEYS + 1, end))
        for block in range(begin + 1, start):  # the window cuts these for the last row
            p, acc, peak, weight = _visit(
                base + block - begin, block, limit, q, p, acc, peak, weight, blocks, ready, free,
                row_position, scale, KEYS, STAGES, True, WINDOW, s_layout, o_layout,
            )  # fmt: skip
    for block in range(start, gl.minimum(full, end)):
        p, acc, peak, weight = _visit(
            base + block - begin, block, limit, q, p, acc, peak, weight, blocks, ready, free,
            row_position, scale, KEYS, STAGES, False, WINDOW, s_layout, o_layout,
        )  # fmt: skip
    for block in range(gl.maximum(full, start), end):
        p, acc, peak, weight = _visit(
            base + block - begin, block, limit, q, p, acc, peak, weight, blocks, ready, free,
            row_position, scale, KEYS, STAGES, True, WINDOW, s_layout, o_layout,
        )  # fmt: skip
    return p, acc, peak, weight


@gluon.jit
def last_values(
    p, acc, blocks, free, base, begin, end, last,
    KEYS: gl.constexpr, STAGES: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """Adds the weighted values of the last block, the one before `end`, to the sums [rows, dim]."""
    stage = (base + end - begin - 1) % STAGES
    values = blocks.index(2 * stage + 1)
    if end * KEYS > last + 1:  # an earlier owner may have left anything past the end, even NaN
        value_key = (end - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, flat))
        kept = gl.where(gl.expand_dims(value_key <= last, 1), values.load(flat), 0.0)
        values.store(kept)  # both groups store the same
        fence_async_shared()
        gl.barrier()
    acc = warpgroup_mma(p, values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.barrier()
    mbarrier.arrive(free.index(stage), count=1)
    return acc
