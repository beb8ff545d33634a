"""The second kernel of `triton_streaming.py`: it adds the parts of a context."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.kv_format.kvarn.triton_heads import rotated, store_heads
from jaxserve_kernels.kv_format.kvarn.triton_ring import units_of
from jaxserve_kernels.paged_attention.triton_visits import MASKED


@gluon.jit
def merge(
    sums_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, position_ptr, out_ptr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr,
    ROWS: gl.constexpr, HEADS: gl.constexpr, QUARTER: gl.constexpr, GROUP: gl.constexpr,
    CHUNK: gl.constexpr, SPLITS: gl.constexpr, MIN_UNITS: gl.constexpr, WIDTH: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """Merges the parts of a tile and HEADS query heads that share a KV head: adds them by their
    softmax weights, WIDTH at a time, and rotates the sum back. Warps share the parts of a single
    head, or take one head each."""
    DIM: gl.constexpr = 4 * QUARTER
    group: gl.constexpr = q_heads // kv_heads
    SHARE: gl.constexpr = gl.num_warps() if HEADS == 1 else 1
    wide: gl.constexpr = gl.BlockedLayout(
        [WIDTH // SHARE, 1, 1], [1, 1, 32], [SHARE, gl.num_warps() // SHARE, 1], [2, 1, 0]
    )
    flat: gl.constexpr = gl.SliceLayout(0, wide)
    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    first_head = 0
    if HEADS == 1:
        first_head = kv_head % group
        kv_head = kv_head // group
    length = gl.load(length_ptr + tile)
    token = gl.load(first_ptr + tile).to(gl.int64)
    _, _, units = units_of(gl.load(position_ptr + tile), GROUP, CHUNK)
    per_split = gl.maximum((units + SPLITS - 1) // SPLITS, MIN_UNITS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length == 0:
        return
    used = (units + per_split - 1) // per_split
    number = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    number = gl.expand_dims(gl.expand_dims(number, 1), 2)
    head = first_head + gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(1, flat)), 1)
    dim = gl.expand_dims(gl.arange(0, QUARTER, gl.SliceLayout(0, flat)), 0)
    first = (tile * kv_heads + kv_head).to(gl.int64) * (SPLITS * ROWS)
    own = gl.expand_dims(gl.minimum(head, group - 1) + dim * 0, 0)
    peak = gl.full([HEADS, QUARTER], MASKED, gl.float32, flat)
    weight = gl.zeros([HEADS, QUARTER], gl.float32, flat)
    x0 = weight
    x1 = weight
    x2 = weight
    x3 = weight
    for begin in range(0, used, WIDTH):
        part = first + (begin + number) * ROWS + own
        there = (begin + number < used) & (own >= 0)
        peaks = gl.load(peak_ptr + part, mask=there, other=MASKED)
        weights = gl.load(weight_ptr + part, mask=there, other=0.0)
        source = sums_ptr + part * DIM + gl.expand_dims(dim, 0)
        s0 = gl.load(source, mask=there, other=0.0)
        s1 = gl.load(source + QUARTER, mask=there, other=0.0)
        s2 = gl.load(source + 2 * QUARTER, mask=there, other=0.0)
        s3 = gl.load(source + 3 * QUARTER, mask=there, other=0.0)
        new_peak = gl.maximum(peak, gl.max(peaks, axis=0))
        shares = gl.exp2(peaks - gl.expand_dims(new_peak, 0))
        shrink = gl.exp2(peak - new_peak)
        peak = new_peak
        weight = weight * shrink + gl.sum(weights * shares, axis=0)
        x0 = x0 * shrink + gl.sum(s0 * shares, axis=0)
        x1 = x1 * shrink + gl.sum(s1 * shares, axis=0)
        x2 = x2 * shrink + gl.sum(s2 * shares, axis=0)
        x3 = x3 * shrink + gl.sum(s3 * shares, axis=0)
    share = 1.0 / weight
    x0, x1, x2, x3 = rotated(x0 * share, x1 * share, x2 * share, x3 * share)
    target = out_ptr + (token * q_heads + kv_head * group + head) * DIM
    store_heads(target, x0, x1, x2, x3, head < group)
