"""The softmax of each warp in `triton_warps`: before the first page, and after the last one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.paged_attention.triton_visits import (
    BF16,
    FP8,
    INT8,
    LIFT,
    MASKED,
    of_all_warps,
)


@gluon.jit
def own_key(
    low, high, heads_mem, key_scale, value_scale, owner,
    scale: gl.constexpr, group: gl.constexpr, sums: gl.constexpr, KEYS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """The softmax of each warp before the first page: of the first warp, if the program is the
    `owner` of the token's key and value, with these as its first key; of the others with none."""
    ROWS: gl.constexpr = low.shape[0]
    HALF: gl.constexpr = low.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    by_query: gl.constexpr = gl.SliceLayout(1, sums)
    of_dim: gl.constexpr = gl.SliceLayout(0, low.type.layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    peak = gl.full([WARPS, ROWS], MASKED, gl.float32, by_query)
    weights = gl.zeros([WARPS, KEYS, ROWS], gl.float32, sums)
    acc_low = gl.zeros([WARPS, HALF, ROWS], gl.float32, sums)
    acc_high = acc_low
    if owner:
        heads = heads_mem.reinterpret(heads_mem.dtype, [2 * ROWS, HALF], vector)
        products = low * gl.expand_dims(heads.index(group).load(of_dim).to(gl.float32), 0)
        key_high = heads.index(ROWS + group).load(of_dim).to(gl.float32)
        products += high * gl.expand_dims(key_high, 0)
        score = gl.sum(products, axis=1) * (key_scale * scale)
        score = gl.expand_dims(gl.convert_layout(score, gl.SliceLayout(0, by_query)), 0)
        warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, by_query)), 1)
        peak = gl.where(warp == 0, score, peak)
        one = gl.expand_dims(gl.where(warp == 0, 1.0, peak * 0.0), 1)
        down: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sums))
        key = gl.expand_dims(gl.expand_dims(gl.arange(0, KEYS, down), 0), 2)
        weights += gl.where(key == 0, one, 0.0)
        if KIND == INT8:
            one *= value_scale * LIFT
        value = heads.index(group + 1).load(down).to(gl.float32)
        acc_low += gl.expand_dims(gl.expand_dims(value, 0), 2) * one
        value = heads.index(ROWS + group + 1).load(down).to(gl.float32)
        acc_high += gl.expand_dims(gl.expand_dims(value, 0), 2) * one
    return peak, weights, acc_low, acc_high


@gluon.jit
def _joined(ring, peak, weights, acc_low, acc_high, flat: gl.constexpr):
    """The softmax of all warps: both halves of its sums [rows, half], its peaks and its weights.
    Takes the memory of the ring."""
    WARPS: gl.constexpr = acc_low.shape[0]
    HALF: gl.constexpr = acc_low.shape[1]
    ROWS: gl.constexpr = acc_low.shape[2]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    spread_4: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [3, 2, 1, 0])
    spread_2: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    peaks_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    weights_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    acc = gl.permute(gl.join(acc_low, acc_high), (3, 0, 2, 1))
    gl.barrier()  # all warps have finished reading the ring
    ring.reinterpret(gl.float32, [2, WARPS, ROWS, HALF], spread_4).store(acc)
    peaks_mem.store(peak)
    weights_mem.store(gl.sum(weights, axis=1))
    return of_all_warps(
        ring.reinterpret(gl.float32, [2 * WARPS, ROWS, HALF], spread_2),
        peaks_mem.reinterpret(gl.float32, [WARPS, ROWS], vector),
        weights_mem.reinterpret(gl.float32, [WARPS, ROWS], vector),
        flat,
    )  # fmt: skip


@gluon.jit
def _with_sink(low, high, peak, weight, sink):
    """The softmax with each query's sink, a logit without a value."""
    sink = sink.to(gl.float32) * 1.4426950408889634
    top = gl.maximum(peak, sink)
    shrink = gl.exp2(peak - top)
    weight = weight * shrink + gl.exp2(sink - top)
    low *= gl.expand_dims(shrink, 1)
    high *= gl.expand_dims(shrink, 1)
    return low, high, top, weight


@gluon.jit
def _store(out_ptr, place, low, high, group: gl.constexpr):
    """Stores both halves of the first `group` heads at their places, in the target's dtype."""
    HALF: gl.constexpr = low.shape[1]
    row = gl.expand_dims(gl.arange(0, low.shape[0], gl.SliceLayout(1, low.type.layout)), 1)
    dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, low.type.layout)), 0)
    at = out_ptr + gl.expand_dims(place, 1) * (2 * HALF) + dim
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gl.store(at, low.to(dtype), mask=row < group)
    gl.store(at + HALF, high.to(dtype), mask=row < group)


@gluon.jit
def finish(
    ring, peak, weights, acc_low, acc_high, value_scale, sinks_ptr, out_ptr, part_ptr, peak_ptr,
    weight_ptr, token, tile, kv_head, split, alone, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    SPLITS: gl.constexpr, KIND: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """Stores the attention's result. If other splits have visited some pages (not `alone`): the
    sums, for `merged`."""
    ROWS: gl.constexpr = acc_low.shape[2]
    group: gl.constexpr = q_heads // kv_heads
    row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    low, high, peak, weight = _joined(ring, peak, weights, acc_low, acc_high, flat)
    if sinks_ptr is not None:  # noqa: SIM102  (known when it is compiled)
        if split == 0:
            sink = gl.load(sinks_ptr + kv_head * group + row, mask=row < group, other=0.0)
            low, high, peak, weight = _with_sink(low, high, peak, weight, sink)
    if KIND != BF16:
        rest = value_scale if KIND == FP8 else 1.0 / LIFT
        low *= rest
        high *= rest
    if alone:
        share = gl.expand_dims(1.0 / weight, 1)
        place = token * q_heads + kv_head * group + row
        _store(out_ptr, place, low * share, high * share, group)
    elif SPLITS > 1:
        place = ((tile * kv_heads + kv_head) * SPLITS + split).to(gl.int64) * ROWS + row
        _store(part_ptr, place, low, high, group)
        gl.store(peak_ptr + place, peak, mask=row < group)
        gl.store(weight_ptr + place, weight, mask=row < group)
