"""Attention of a token's heads over keys in shared memory: in full precision, or a page of codes.

Each warp takes some of the keys and has its own peak, weights and sums. The first axis of these,
and of the products, is that of warps. `triton_page` explains the arithmetic of codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jaxserve_kernels.kv_format.kvarn.triton_page import code_quarters, float16_pair
from jaxserve_kernels.paged_attention.triton_visits import MASKED, for_each_warp

_OFFSET = gl.constexpr(128.0 + 7.5)
"""The bfloat16 number for the middle of the codes' range."""


@gluon.jit
def stacked(x0, x1, x2, x3):
    """Stacks four matrices: [4, ...]."""
    x = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [..., number % 2, number // 2]
    return gl.reshape(gl.permute(x, (3, 2, 0, 1)), [4, x0.shape[0], x0.shape[1]])


@gluon.jit
def _raw(tile, left: gl.constexpr):
    """Loads one quarter of the heads' keys or values in full precision."""
    return tile.load(left).to(gl.bfloat16, bitcast=True)


@gluon.jit
def visit_raw(
    tiles, first, held, q0, q1, q2, q3, peak, weights, acc0, acc1, acc2, acc3,
    scale: gl.constexpr,
):  # fmt: skip
    """Visits keys in full precision, a quarter of them per warp. Keys after the first `held` are
    masked."""
    layout: gl.constexpr = weights.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    scores = mma_v2(_raw(tiles.index(first), left), q0, gl.zeros_like(weights))
    scores = mma_v2(_raw(tiles.index(first + 1), left), q1, scores)
    scores = mma_v2(_raw(tiles.index(first + 2), left), q2, scores)
    scores = mma_v2(_raw(tiles.index(first + 3), left), q3, scores) * scale
    of_warp = gl.arange(0, weights.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    key = gl.arange(0, weights.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    key = gl.expand_dims(of_warp, 1) * weights.shape[1] + gl.expand_dims(key, 0)
    scores = gl.where(gl.expand_dims(key < held, 2), scores, MASKED)
    before = peak
    peak = gl.maximum(peak, gl.max(scores, axis=1))
    probs = gl.exp2(scores - gl.expand_dims(peak, 1))
    shrink = gl.expand_dims(gl.exp2(before - peak), 1)
    weights = weights * shrink + probs
    p = gl.convert_layout(probs.to(gl.bfloat16), right)
    acc0 = mma_v2(_raw(tiles.index(first + 4).permute((0, 2, 1)), left), p, acc0 * shrink)
    acc1 = mma_v2(_raw(tiles.index(first + 5).permute((0, 2, 1)), left), p, acc1 * shrink)
    acc2 = mma_v2(_raw(tiles.index(first + 6).permute((0, 2, 1)), left), p, acc2 * shrink)
    acc3 = mma_v2(_raw(tiles.index(first + 7).permute((0, 2, 1)), left), p, acc3 * shrink)
    return peak, weights, acc0, acc1, acc2, acc3


@gluon.jit
def _scaled(q, words):
    """A quarter of the queries times the keys' scales, rounded; and the contribution of zeros and
    offset to scores, by channel."""
    scale, zero = float16_pair(words.load(gl.SliceLayout(0, q.type.layout)))
    wide = q.to(gl.float32)
    factor = (wide * gl.expand_dims(scale, 0)).to(gl.bfloat16)
    rest = wide * gl.expand_dims(zero + 7.5 * scale, 0) - _OFFSET * factor.to(gl.float32)
    return factor, rest


@gluon.jit
def _code_scores(tile, f0, f1, f2, f3, rest, column, none):
    """Scores of the codes of half a page's keys."""
    left: gl.constexpr = gl.DotOperandLayout(0, none.type.layout, 2)
    k0, k1, k2, k3 = code_quarters(tile.load(left), 0, 4, True)
    out = mma_v2(k0, f0, none)
    out = mma_v2(k1, f1, out)
    out = mma_v2(k2, f2, out)
    out = mma_v2(k3, f3, out)
    return (out + rest) * gl.expand_dims(column, 2)


@gluon.jit
def _value_factor(probs, words, MIDDLE: gl.constexpr):
    """Probabilities times the values' scales, rounded; and the contribution of zeros and offset, by
    key."""
    scale, zero = float16_pair(words.load(gl.SliceLayout(2, probs.type.layout)))
    factor = (probs * gl.expand_dims(scale, 2)).to(gl.bfloat16)
    rest = probs * gl.expand_dims(zero + MIDDLE * scale, 2)
    return factor, rest - (128.0 + MIDDLE) * factor.to(gl.float32)


@gluon.jit
def _columns(words, layout: gl.constexpr):
    """Scales of the values' channels: those of a quarter, and those half a head later."""
    low, high = float16_pair(words.load(gl.SliceLayout(0, gl.SliceLayout(2, layout))))
    low = gl.expand_dims(gl.expand_dims(low, 0), 2)
    return low, gl.expand_dims(gl.expand_dims(high, 0), 2)


@gluon.jit
def visit_codes(
    tiles, first, scales, key_scales, first_scales, y0, y1, y2, y3, factors, factor_mem,
    peak, weights, acc0, acc1, acc2, acc3,
    scale: gl.constexpr, QUARTER: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Visits a page of codes. Each warp takes some tokens of each half.

    The page's scales are vectors in `scales` from `first_scales` on; `key_scales` has halves of
    them by warp and token. `factor_mem`, the same memory as `factors`, is for the queries times the
    keys' scales, which the warps share.
    """
    layout: gl.constexpr = weights.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    by_key: gl.constexpr = gl.SliceLayout(2, layout)
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    words = scales.index(first_scales)
    f0, r0 = _scaled(y0, words.slice(0, QUARTER))
    f1, r1 = _scaled(y1, words.slice(QUARTER, QUARTER))
    f2, r2 = _scaled(y2, words.slice(2 * QUARTER, QUARTER))
    f3, r3 = _scaled(y3, words.slice(3 * QUARTER, QUARTER))
    rest = gl.sum((r0 + r1) + (r2 + r3), axis=1)
    rest = gl.convert_layout(rest, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    rest = gl.expand_dims(gl.expand_dims(rest, 0), 1)
    factors.store(stacked(f0, f1, f2, f3))
    g0 = for_each_warp(factor_mem.index(0), right)
    g1 = for_each_warp(factor_mem.index(1), right)
    g2 = for_each_warp(factor_mem.index(2), right)
    g3 = for_each_warp(factor_mem.index(3), right)
    none = gl.zeros_like(weights)
    low, high = float16_pair(key_scales.index(2 * first_scales + 3).load(by_key))
    s0 = _code_scores(tiles.index(first), g0, g1, g2, g3, rest, low * scale, none)
    s1 = _code_scores(tiles.index(first + 1), g0, g1, g2, g3, rest, high * scale, none)
    before = peak
    peak = gl.maximum(peak, gl.max(gl.maximum(s0, s1), axis=1))
    p0 = gl.exp2(s0 - gl.expand_dims(peak, 1))
    p1 = gl.exp2(s1 - gl.expand_dims(peak, 1))
    shrink = gl.expand_dims(gl.exp2(before - peak), 1)
    weights = weights * shrink + (p0 + p1)
    w0, e0 = _value_factor(p0, key_scales.index(2 * first_scales + 4), MIDDLE)
    w1, e1 = _value_factor(p1, key_scales.index(2 * first_scales + 5), MIDDLE)
    added = gl.expand_dims(gl.sum(e0 + e1, axis=1), 1)
    w0 = gl.convert_layout(w0, right)
    w1 = gl.convert_layout(w1, right)
    early = tiles.index(first + 2).permute((0, 2, 1)).load(left)
    v0, v1, v2, v3 = code_quarters(early, 0, BITS, True)
    nothing = gl.zeros_like(acc0)
    r0 = mma_v2(v0, w0, nothing)
    r1 = mma_v2(v1, w0, nothing)
    r2 = mma_v2(v2, w0, nothing)
    r3 = mma_v2(v3, w0, nothing)
    late = tiles.index(first + 3).permute((0, 2, 1)).load(left) if BITS == 4 else early
    v0, v1, v2, v3 = code_quarters(late, 1, BITS, True)
    r0 = mma_v2(v0, w1, r0)
    r1 = mma_v2(v1, w1, r1)
    r2 = mma_v2(v2, w1, r2)
    r3 = mma_v2(v3, w1, r3)
    words = scales.index(first_scales + 1)
    c0, c2 = _columns(words.slice(0, QUARTER), layout)
    c1, c3 = _columns(words.slice(QUARTER, QUARTER), layout)
    acc0 = acc0 * shrink + (r0 + added) * c0
    acc1 = acc1 * shrink + (r1 + added) * c1
    acc2 = acc2 * shrink + (r2 + added) * c2
    acc3 = acc3 * shrink + (r3 + added) * c3
    return peak, weights, acc0, acc1, acc2, acc3
