"""The softmax of each warp in `triton_streaming`: with the token's own key, and of all warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def own_key(
    y0, y1, y2, y3, heads_mem, peak, weights, acc0, acc1, acc2, acc3,
    scale: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """Adds the token's key and value, the heads after `group` queries, to the first warp's softmax,
    as its first key."""
    WARPS: gl.constexpr = acc0.shape[0]
    QUARTER: gl.constexpr = acc0.shape[1]
    ROWS: gl.constexpr = acc0.shape[2]
    KEYS: gl.constexpr = weights.shape[1]
    sums: gl.constexpr = acc0.type.layout
    by_query: gl.constexpr = gl.SliceLayout(1, sums)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = heads_mem.reinterpret(gl.bfloat16, [4 * ROWS, QUARTER], vector)
    across: gl.constexpr = gl.SliceLayout(0, y0.type.layout)
    scores = y0.to(gl.float32) * gl.expand_dims(rows.index(group).load(across), 0)
    scores += y1.to(gl.float32) * gl.expand_dims(rows.index(ROWS + group).load(across), 0)
    scores += y2.to(gl.float32) * gl.expand_dims(rows.index(2 * ROWS + group).load(across), 0)
    scores += y3.to(gl.float32) * gl.expand_dims(rows.index(3 * ROWS + group).load(across), 0)
    score = gl.convert_layout(gl.sum(scores, axis=1), gl.SliceLayout(0, by_query)) * scale
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, by_query))
    is_first = gl.expand_dims(warp == 0, 1)
    peak = gl.where(is_first, gl.expand_dims(score, 0), peak)
    one = gl.expand_dims(gl.where(is_first, 1.0, peak * 0.0), 1)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, sums)))
    weights += gl.where(gl.expand_dims(gl.expand_dims(key == 0, 0), 2), one, 0.0)
    down: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sums))
    v0 = rows.index(group + 1).load(down).to(gl.float32)
    v1 = rows.index(ROWS + group + 1).load(down).to(gl.float32)
    v2 = rows.index(2 * ROWS + group + 1).load(down).to(gl.float32)
    v3 = rows.index(3 * ROWS + group + 1).load(down).to(gl.float32)
    acc0 += gl.expand_dims(gl.expand_dims(v0, 0), 2) * one
    acc1 += gl.expand_dims(gl.expand_dims(v1, 0), 2) * one
    acc2 += gl.expand_dims(gl.expand_dims(v2, 0), 2) * one
    acc3 += gl.expand_dims(gl.expand_dims(v3, 0), 2) * one
    return peak, weights, acc0, acc1, acc2, acc3


@gluon.jit
def of_all_warps(ring, peak, weights, acc0, acc1, acc2, acc3, layout: gl.constexpr):
    """Adds the warps' results by their softmax weights, in the ring's memory: quarters [rows,
    quarter] in a layout of all warps, and the peak and weight of the sum."""
    WARPS: gl.constexpr = acc0.shape[0]
    QUARTER: gl.constexpr = acc0.shape[1]
    ROWS: gl.constexpr = acc0.shape[2]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    peaks_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    weights_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    spread_4: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [3, 2, 1, 0])
    spread_2: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    found_shape: gl.constexpr = [4, WARPS, ROWS, QUARTER]
    acc = gl.join(gl.join(acc0, acc1), gl.join(acc2, acc3))
    acc = gl.reshape(gl.permute(acc, (4, 3, 0, 2, 1)), found_shape)
    ring.reinterpret(gl.float32, found_shape, spread_4).store(acc)
    peaks_mem.store(peak)
    weights_mem.store(gl.sum(weights, axis=1))
    return _added(
        ring.reinterpret(gl.float32, [4 * WARPS, ROWS, QUARTER], spread_2),
        peaks_mem.reinterpret(gl.float32, [WARPS, ROWS], vector),
        weights_mem.reinterpret(gl.float32, [WARPS, ROWS], vector),
        WARPS, layout,
    )  # fmt: skip


@gluon.jit
def _added(
    found, peaks_mem, weights_mem, WARPS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """`of_all_warps` of results in shared memory."""
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    top = peaks_mem.index(0).load(of_row)
    for warp in gl.static_range(1, WARPS):
        top = gl.maximum(top, peaks_mem.index(warp).load(of_row))
    weight = gl.zeros_like(top)
    x0 = gl.expand_dims(weight, 1)
    x1 = x0
    x2 = x0
    x3 = x0
    for warp in gl.static_range(WARPS):
        share = gl.exp2(peaks_mem.index(warp).load(of_row) - top)
        weight += weights_mem.index(warp).load(of_row) * share
        share = gl.expand_dims(share, 1)
        x0 += found.index(warp).load(layout) * share
        x1 += found.index(WARPS + warp).load(layout) * share
        x2 += found.index(2 * WARPS + warp).load(layout) * share
        x3 += found.index(3 * WARPS + warp).load(layout) * share
    return x0, x1, x2, x3, top, weight
