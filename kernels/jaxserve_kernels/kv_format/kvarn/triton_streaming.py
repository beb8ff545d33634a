"""Attention of a decode step's tokens over a KVarN cache, from the projection's partial sums.

A program takes one token, KV head and part of the context, as in `triton_attention`, but computes
what it needs of the token itself: no kernel lies between, and what earlier steps have left is
copied into a ring while the product before runs. The part that holds the token's place sees its
key first, and writes it and the value into the sink or the tail.

In Gluon, because then each warp has a softmax of its own over a quarter of the keys, and sums of
its own: within a page warps wait for each other only where they share the scaled queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_attention import part_types
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.triton_call import triton_call

MAX_TOKENS = 64
"""Steps of more are no chains: there is less to copy ahead of."""

_TARGET_PROGRAMS = 264
"""Two for each of an H100's multiprocessors, as in `paged_attention`."""

_ROWS = 8
"""Queries that share a KV head, its key and its value, and padding: columns of products."""

_GROUP = 128
_QUARTER = 32
"""The tiles and heads that this kernel is for."""

_CHUNK = 64
"""Keys in full precision that are visited together."""

_TILES = gl.constexpr(8)
"""In a stage of the ring, each of `_CHUNK` tokens by a quarter of a head: four of keys and four of
values in full precision, or two of each as words of codes (one of values of 2 bits)."""

_MASKED = gl.constexpr(-1.0e30)

_UNPACK_4 = gl.constexpr("""{ .reg .b32 a,b,c; shr.u32 a,$4,4; shr.u32 b,$4,8; shr.u32 c,$4,12;
    lop3.b32 $0,$4,0x000f000f,0x43004300,0xea; lop3.b32 $1,a,0x000f000f,0x43004300,0xea;
    lop3.b32 $2,b,0x000f000f,0x43004300,0xea; lop3.b32 $3,c,0x000f000f,0x43004300,0xea; }""")
_UNPACK_2 = gl.constexpr("""{ .reg .b32 a,b,c; shr.u32 a,$4,2; shr.u32 b,$4,4; shr.u32 c,$4,6;
    lop3.b32 $0,$4,0x00030003,0x43004300,0xea; lop3.b32 $1,a,0x00030003,0x43004300,0xea;
    lop3.b32 $2,b,0x00030003,0x43004300,0xea; lop3.b32 $3,c,0x00030003,0x43004300,0xea; }""")
_UNPACK_2_LATE = gl.constexpr("""{ .reg .b32 a,b,c,d; shr.u32 a,$4,8; shr.u32 b,$4,10;
    shr.u32 c,$4,12; shr.u32 d,$4,14;
    lop3.b32 $0,a,0x00030003,0x43004300,0xea; lop3.b32 $1,b,0x00030003,0x43004300,0xea;
    lop3.b32 $2,c,0x00030003,0x43004300,0xea; lop3.b32 $3,d,0x00030003,0x43004300,0xea; }""")
"""Words of two codes each to four bfloat16 numbers, 128 + a code."""


@gluon.jit
def _places(PARTS: gl.constexpr, CHUNK: gl.constexpr, QUARTER: gl.constexpr):
    """Numbers of parts, rows and words of tiles [parts, rows, words], copied 16 bytes at a time."""
    copy: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // QUARTER, QUARTER // 8], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    rows: gl.constexpr = gl.SliceLayout(0, copy)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, rows))
    word = gl.arange(0, QUARTER, gl.SliceLayout(0, rows))
    return (
        gl.expand_dims(gl.expand_dims(part, 1), 2),
        gl.expand_dims(gl.expand_dims(row, 1), 0),
        gl.expand_dims(gl.expand_dims(word, 0), 0),
    )


@gluon.jit
def _copy_raw(
    tiles, source, held, GROUP: gl.constexpr, QUARTER: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """A chunk of keys, and of values, in full precision: the first `held`, then zeros."""
    part, row, word = _places(_TILES, CHUNK, QUARTER)
    source = source.to(gl.pointer_type(gl.int16), bitcast=True)
    source += part // 4 * (4 * GROUP * QUARTER) + part % 4 * QUARTER + row * (4 * QUARTER) + word
    async_copy.async_copy_global_to_shared(tiles, source, mask=row < held)


@gluon.jit
def _copy_words(
    tiles, source, PARTS: gl.constexpr, QUARTER: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    part, row, word = _places(PARTS, CHUNK, QUARTER)
    source += part * (CHUNK * QUARTER) + row * QUARTER + word
    async_copy.async_copy_global_to_shared(tiles, source)


@gluon.jit
def _copy_scales(vectors, source, LENGTH: gl.constexpr):
    """Three vectors of 32-bit words of two scales."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    part = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    source = source.to(gl.pointer_type(gl.int32), bitcast=True) + part * LENGTH
    source += gl.expand_dims(gl.arange(0, LENGTH, gl.SliceLayout(0, layout)), 0)
    async_copy.async_copy_global_to_shared(vectors, source, mask=part < 3)


@gluon.jit
def _copy_unit(
    index, stage, page, ring, scales, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    first_tile, own_tile, sink_units, raw_units, offset, kv_head,
    kv_heads: gl.constexpr, GROUP: gl.constexpr, QUARTER: gl.constexpr, BITS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """One unit of a context: a chunk of the sink or the own page, of which earlier steps have left
    `offset` tokens, or the codes of `page`."""
    DIM: gl.constexpr = 4 * QUARTER
    tiles = ring.index(stage)
    if index < raw_units:
        in_own = index >= sink_units
        first = (index - gl.where(in_own, sink_units, 0)) * CHUNK
        kept = gl.where(in_own, own_tile, first_tile)
        source = raw_ptr + ((kept * kv_heads + kv_head) * 2 * GROUP + first) * DIM
        held = gl.where(in_own, offset, GROUP) - first
        _copy_raw(tiles, source, held, GROUP, QUARTER, CHUNK)
    else:
        tile = page.to(gl.int64) * kv_heads + kv_head
        keys = key_words_ptr + tile * (GROUP * QUARTER)
        _copy_words(tiles.slice(0, 2), keys, 2, QUARTER, CHUNK)
        values = value_words_ptr + tile * (GROUP * BITS // 4 * QUARTER)
        _copy_words(tiles.slice(2, BITS // 2), values, BITS // 2, QUARTER, CHUNK)
        _copy_scales(scales.index(stage), scales_ptr + tile * (3 * (DIM + GROUP)), GROUP)


@gluon.jit
def _rounded(x):
    """To bfloat16's digits."""
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _transformed(x):
    """x [rows, 32], a row in the lanes of a warp, times Sylvester's matrix."""
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
def _rotated(x0, x1, x2, x3):
    """Rows of heads in four quarters [rows, quarter], rotated: bfloat16."""
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
def _heads(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
    stride: gl.constexpr, parts: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    eps: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr, layout: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The queries that share a KV head, in the next row its key, in the one after that its value:
    four quarters [rows, quarter], normed, turned and rotated, in bfloat16; rounded where the
    reference rounds."""
    DIM: gl.constexpr = 4 * QUARTER
    HALF: gl.constexpr = 2 * QUARTER
    group: gl.constexpr = q_heads // kv_heads
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, QUARTER, gl.SliceLayout(0, layout)), 0)
    is_query = gl.expand_dims(row < group, 1)
    is_value = gl.expand_dims(row > group, 1)
    head = gl.where(row < group, kv_head * group + row, q_heads + kv_head)
    head += gl.where(row > group, kv_heads, 0)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + gl.expand_dims(head, 1)) * DIM + dim
    there = gl.expand_dims(row < group + 2, 1)
    q_norm = q_norm_ptr + dim
    k_norm = k_norm_ptr + dim
    n0 = gl.where(is_query, gl.load(q_norm), gl.load(k_norm)).to(gl.float32)
    n1 = gl.where(is_query, gl.load(q_norm + QUARTER), gl.load(k_norm + QUARTER)).to(gl.float32)
    n2 = gl.where(is_query, gl.load(q_norm + HALF), gl.load(k_norm + HALF)).to(gl.float32)
    late: gl.constexpr = 3 * QUARTER
    n3 = gl.where(is_query, gl.load(q_norm + late), gl.load(k_norm + late)).to(gl.float32)
    cos0 = gl.load(cos_ptr + token * HALF + dim)
    cos1 = gl.load(cos_ptr + token * HALF + QUARTER + dim)
    sin0 = gl.load(sin_ptr + token * HALF + dim)
    sin1 = gl.load(sin_ptr + token * HALF + QUARTER + dim)
    x0 = gl.zeros([ROWS, QUARTER], gl.float32, layout)
    x1 = x0
    x2 = x0
    x3 = x0
    if EARLY:
        gdc_wait()
    for part in gl.static_range(parts):
        x0 += gl.load(source + part * stride, mask=there, other=0.0)
        x1 += gl.load(source + (part * stride + QUARTER), mask=there, other=0.0)
        x2 += gl.load(source + (part * stride + HALF), mask=there, other=0.0)
        x3 += gl.load(source + (part * stride + late), mask=there, other=0.0)
    x0 = _rounded(x0)
    x1 = _rounded(x1)
    x2 = _rounded(x2)
    x3 = _rounded(x3)
    square = gl.sum((x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3), axis=1) / DIM
    scale = gl.expand_dims(gl.rsqrt(square + eps), 1)
    a = _rounded(_rounded(x0 * scale) * n0)
    b = _rounded(_rounded(x1 * scale) * n1)
    c = _rounded(_rounded(x2 * scale) * n2)
    d = _rounded(_rounded(x3 * scale) * n3)
    return _rotated(
        gl.where(is_value, x0, _rounded(a * cos0 - c * sin0)),
        gl.where(is_value, x1, _rounded(b * cos1 - d * sin1)),
        gl.where(is_value, x2, _rounded(c * cos0 + a * sin0)),
        gl.where(is_value, x3, _rounded(d * cos1 + b * sin1)),
    )


@gluon.jit
def _two(words):
    """The float16 numbers in the low and the high half of words, in float32."""
    low = words.to(gl.int16).to(gl.float16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def _quarters(words, HALF: gl.constexpr, BITS: gl.constexpr):
    """128 + the codes of the four quarters of half a tile, in bfloat16: see `triton_page`."""
    asm: gl.constexpr = _UNPACK_4 if BITS == 4 else (_UNPACK_2_LATE if HALF else _UNPACK_2)
    a, b, c, d = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r", [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return a, b, c, d


@gluon.jit
def _stacked(x0, x1, x2, x3):
    """Four matrices behind one another, [4, ...]."""
    x = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [..., number % 2, number // 2]
    return gl.reshape(gl.permute(x, (3, 2, 0, 1)), [4, x0.shape[0], x0.shape[1]])


@gluon.jit
def _for_each_warp(memory, NAME: gl.constexpr):
    """A quarter of the queries, [rows, quarter] in shared memory, as what each warp multiplies its
    keys with: [warps, quarter, rows]."""
    x = memory.permute((1, 0)).load(gl.SliceLayout(0, NAME))
    shape: gl.constexpr = [gl.num_warps(), x.shape[0], x.shape[1]]
    return gl.expand_dims(x, 0).broadcast_to(shape)


@gluon.jit
def _raw(tile, left: gl.constexpr):
    """Keys or values in full precision, a quarter of their heads."""
    return tile.load(left).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _step(scores, peak):
    """How a softmax moves on: each warp has one of its own."""
    new_peak = gl.maximum(peak, gl.max(scores, axis=1))
    probs = gl.exp2(scores - gl.expand_dims(new_peak, 1))
    return new_peak, probs, gl.expand_dims(gl.exp2(peak - new_peak), 1)


@gluon.jit
def _visit_raw(
    tiles, first, held, q0, q1, q2, q3, peak, weights, acc0, acc1, acc2, acc3,
    scale: gl.constexpr,
):  # fmt: skip
    """Keys in full precision, of which the first `held` count: a quarter of them by each warp."""
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
    scores = gl.where(gl.expand_dims(key < held, 2), scores, _MASKED)
    peak, probs, shrink = _step(scores, peak)
    weights = weights * shrink + probs
    p = gl.convert_layout(probs.to(gl.bfloat16), right)
    acc0 = mma_v2(_raw(tiles.index(first + 4).permute((0, 2, 1)), left), p, acc0 * shrink)
    acc1 = mma_v2(_raw(tiles.index(first + 5).permute((0, 2, 1)), left), p, acc1 * shrink)
    acc2 = mma_v2(_raw(tiles.index(first + 6).permute((0, 2, 1)), left), p, acc2 * shrink)
    acc3 = mma_v2(_raw(tiles.index(first + 7).permute((0, 2, 1)), left), p, acc3 * shrink)
    return peak, weights, acc0, acc1, acc2, acc3


@gluon.jit
def _scaled(q, words, OFFSET: gl.constexpr):
    """A quarter of the queries times the keys' scales, rounded; and what zeros and offset add to
    scores, by channel."""
    scale, zero = _two(words.load(gl.SliceLayout(0, q.type.layout)))
    wide = q.to(gl.float32)
    factor = (wide * gl.expand_dims(scale, 0)).to(gl.bfloat16)
    rest = wide * gl.expand_dims(zero + 7.5 * scale, 0) - OFFSET * factor.to(gl.float32)
    return factor, rest


@gluon.jit
def _code_scores(tile, f0, f1, f2, f3, rest, column, none):
    """Scores of half a page's keys, as codes."""
    left: gl.constexpr = gl.DotOperandLayout(0, none.type.layout, 2)
    k0, k1, k2, k3 = _quarters(tile.load(left), 0, 4)
    out = mma_v2(k0, f0, none)
    out = mma_v2(k1, f1, out)
    out = mma_v2(k2, f2, out)
    out = mma_v2(k3, f3, out)
    return (out + rest) * gl.expand_dims(column, 2)


@gluon.jit
def _value_factor(probs, words, MIDDLE: gl.constexpr):
    """Probabilities times the values' scales, rounded; what zeros and offset add, by key."""
    scale, zero = _two(words.load(gl.SliceLayout(2, probs.type.layout)))
    factor = (probs * gl.expand_dims(scale, 2)).to(gl.bfloat16)
    rest = probs * gl.expand_dims(zero + MIDDLE * scale, 2)
    return factor, rest - (128.0 + MIDDLE) * factor.to(gl.float32)


@gluon.jit
def _columns(words, layout: gl.constexpr):
    """Scales of the values' channels: of a quarter, and of the one half a head later."""
    low, high = _two(words.load(gl.SliceLayout(0, gl.SliceLayout(2, layout))))
    low = gl.expand_dims(gl.expand_dims(low, 0), 2)
    return low, gl.expand_dims(gl.expand_dims(high, 0), 2)


@gluon.jit
def _visit_codes(
    tiles, first, scales, key_scales, first_scales, y0, y1, y2, y3, factors, factor_mem,
    peak, weights, acc0, acc1, acc2, acc3,
    scale: gl.constexpr, QUARTER: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """A page of codes, a quarter of each half by each warp: see `triton_page` for how scales and
    zeros enter."""
    layout: gl.constexpr = weights.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    by_key: gl.constexpr = gl.SliceLayout(2, layout)
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    words = scales.index(first_scales)
    f0, r0 = _scaled(y0, words.slice(0, QUARTER), 135.5)
    f1, r1 = _scaled(y1, words.slice(QUARTER, QUARTER), 135.5)
    f2, r2 = _scaled(y2, words.slice(2 * QUARTER, QUARTER), 135.5)
    f3, r3 = _scaled(y3, words.slice(3 * QUARTER, QUARTER), 135.5)
    rest = gl.sum((r0 + r1) + (r2 + r3), axis=1)
    rest = gl.convert_layout(rest, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    rest = gl.expand_dims(gl.expand_dims(rest, 0), 1)
    factors.store(_stacked(f0, f1, f2, f3))
    g0 = _for_each_warp(factor_mem.index(0), right)
    g1 = _for_each_warp(factor_mem.index(1), right)
    g2 = _for_each_warp(factor_mem.index(2), right)
    g3 = _for_each_warp(factor_mem.index(3), right)
    none = gl.zeros_like(weights)
    low, high = _two(key_scales.index(2 * first_scales + 3).load(by_key))
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
    v0, v1, v2, v3 = _quarters(early, 0, BITS)
    nothing = gl.zeros_like(acc0)
    r0 = mma_v2(v0, w0, nothing)
    r1 = mma_v2(v1, w0, nothing)
    r2 = mma_v2(v2, w0, nothing)
    r3 = mma_v2(v3, w0, nothing)
    late = tiles.index(first + 3).permute((0, 2, 1)).load(left) if BITS == 4 else early
    v0, v1, v2, v3 = _quarters(late, 1, BITS)
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


@gluon.jit
def _units(position, GROUP: gl.constexpr, CHUNK: gl.constexpr):
    """Into what programs cut a context, as `triton_attention.units_of`."""
    own = position // GROUP
    sink = gl.minimum(own, 1) * (GROUP // CHUNK)
    raw = sink + position % GROUP // CHUNK + 1
    return sink, raw, raw + gl.maximum(own - 1, 0)


@gluon.jit
def _store_heads(target, x0, x1, x2, x3, mask):
    """Four quarters [rows, quarter] of heads, behind one another at `target`."""
    target += gl.expand_dims(gl.arange(0, x0.shape[1], gl.SliceLayout(0, x0.type.layout)), 0)
    gl.store(target, x0, mask=mask)
    gl.store(target + x0.shape[1], x1, mask=mask)
    gl.store(target + 2 * x0.shape[1], x2, mask=mask)
    gl.store(target + 3 * x0.shape[1], x3, mask=mask)


@gluon.jit
def _of_all_warps(
    found, peaks_mem, weights_mem, WARPS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The sum of what the warps found, by their softmax weights: quarters [rows, quarter], its peak
    and its weight."""
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


@gluon.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    out_ptr, sums_ptr, peak_ptr, weight_ptr,
    first_page, first_slot, table_stride,
    stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr, scale: gl.constexpr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr,
    ROWS: gl.constexpr, QUARTER: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
    CHUNK: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A program per tile, KV head and part."""
    DIM: gl.constexpr = 4 * QUARTER
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = CHUNK // WARPS
    group: gl.constexpr = q_heads // kv_heads
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    by_query: gl.constexpr = gl.SliceLayout(1, sums)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    length = gl.load(length_ptr + tile)
    position = gl.load(position_ptr + tile)
    slot = gl.load(slot_ptr + tile).to(gl.int64)
    token = gl.load(first_ptr + tile).to(gl.int64)
    own = position // GROUP
    offset = position % GROUP
    sink_units, raw_units, units = _units(position, GROUP, CHUNK)
    per_split = (units + SPLITS - 1) // SPLITS
    begin = split * per_split
    stop = gl.minimum(begin + per_split, units)
    owner = (begin < raw_units) & (raw_units <= stop)
    if EARLY:
        gdc_launch_dependents()
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
        return
    if begin >= stop:
        return

    ring = gl.allocate_shared_memory(gl.int16, [STAGES, _TILES, CHUNK, QUARTER], spread)
    tiles = ring._reinterpret(gl.int16, [STAGES * _TILES, WARPS, KEYS, QUARTER], spread)
    scales_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 4, GROUP], plain)
    scales = scales_ring._reinterpret(gl.int32, [STAGES * 4, GROUP], vector)
    key_scales = scales_ring._reinterpret(gl.int32, [STAGES * 8, WARPS, KEYS], plain)
    heads_mem = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, QUARTER], plain)
    heads = heads_mem._reinterpret(gl.bfloat16, [4, ROWS, QUARTER], plain_3)
    table = table_ptr + slot * table_stride
    first_tile = (first_slot + slot) * 2
    own_tile = first_tile + gl.where(own > 0, 1, 0)
    pages = ()
    for stage in gl.static_range(STAGES):  # asked for at once
        number = gl.minimum(gl.maximum(begin + stage - raw_units + 1, 0), own)
        pages = pages + (first_page + gl.load(table + number),)  # noqa: RUF005  (as Triton knows)
    for stage in gl.static_range(STAGES):
        if begin + stage < stop:
            _copy_unit(
                begin + stage, stage, pages[stage], ring, scales_ring,
                key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
                first_tile, own_tile, sink_units, raw_units, offset, kv_head,
                kv_heads, GROUP, QUARTER, BITS, CHUNK,
            )  # fmt: skip
        async_copy.commit_group()

    y0, y1, y2, y3 = _heads(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
        stride, parts, q_heads, kv_heads, eps, ROWS, QUARTER, flat, EARLY,
    )  # fmt: skip
    heads.store(_stacked(y0, y1, y2, y3))
    q0 = _for_each_warp(heads_mem.index(0), right)
    q1 = _for_each_warp(heads_mem.index(1), right)
    q2 = _for_each_warp(heads_mem.index(2), right)
    q3 = _for_each_warp(heads_mem.index(3), right)
    peak = gl.full([WARPS, ROWS], _MASKED, gl.float32, by_query)
    weights = gl.zeros([WARPS, KEYS, ROWS], gl.float32, sums)
    acc0 = gl.zeros([WARPS, QUARTER, ROWS], gl.float32, sums)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, flat)), 1)
    if owner:
        target = raw_ptr + ((own_tile * kv_heads + kv_head) * 2 * GROUP + offset) * DIM
        target += gl.where(row == group, 0, GROUP * DIM)
        _store_heads(target, y0, y1, y2, y3, (row == group) | (row == group + 1))
        # The first warp's first key.
        rows = heads_mem._reinterpret(gl.bfloat16, [4 * ROWS, QUARTER], vector)
        across: gl.constexpr = gl.SliceLayout(0, flat)
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

    for index in range(begin, stop):
        place = (index - begin) % STAGES
        number = gl.minimum(gl.maximum(index + STAGES - raw_units + 1, 0), own)
        page = first_page + gl.load(table + number)
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        if index < raw_units:
            in_own = index >= sink_units
            held = gl.where(in_own, offset - (index - sink_units) * CHUNK, CHUNK)
            peak, weights, acc0, acc1, acc2, acc3 = _visit_raw(
                tiles, place * _TILES, held, q0, q1, q2, q3,
                peak, weights, acc0, acc1, acc2, acc3, scale,
            )  # fmt: skip
        else:
            peak, weights, acc0, acc1, acc2, acc3 = _visit_codes(
                tiles, place * _TILES, scales, key_scales, place * 4, y0, y1, y2, y3,
                heads, heads_mem, peak, weights, acc0, acc1, acc2, acc3, scale, QUARTER, BITS,
            )  # fmt: skip
        if index + STAGES < stop:
            gl.thread_barrier()
            _copy_unit(
                index + STAGES, place, page, ring, scales_ring,
                key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
                first_tile, own_tile, sink_units, raw_units, offset, kv_head,
                kv_heads, GROUP, QUARTER, BITS, CHUNK,
            )  # fmt: skip
        async_copy.commit_group()

    peaks_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    weights_mem = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    spread_4: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [3, 2, 1, 0])
    spread_2: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    found_shape: gl.constexpr = [4, WARPS, ROWS, QUARTER]
    acc = gl.join(gl.join(acc0, acc1), gl.join(acc2, acc3))
    acc = gl.reshape(gl.permute(acc, (4, 3, 0, 2, 1)), found_shape)
    ring._reinterpret(gl.float32, found_shape, spread_4).store(acc)
    peaks_mem.store(peak)
    weights_mem.store(gl.sum(weights, axis=1))
    found = ring._reinterpret(gl.float32, [4 * WARPS, ROWS, QUARTER], spread_2)
    x0, x1, x2, x3, top, weight = _of_all_warps(
        found,
        peaks_mem._reinterpret(gl.float32, [WARPS, ROWS], vector),
        weights_mem._reinterpret(gl.float32, [WARPS, ROWS], vector),
        WARPS, flat,
    )  # fmt: skip
    of_row: gl.constexpr = gl.SliceLayout(1, flat)
    if SPLITS == 1:
        share = gl.expand_dims(1.0 / weight, 1)
        x0, x1, x2, x3 = _rotated(x0 * share, x1 * share, x2 * share, x3 * share)
        target = out_ptr + (token * q_heads + kv_head * group + row) * DIM
        _store_heads(target, x0, x1, x2, x3, row < group)
    else:
        part = ((tile * kv_heads + kv_head) * SPLITS + split).to(gl.int64) * ROWS
        _store_heads(sums_ptr + (part + row) * DIM, x0, x1, x2, x3, row < group)
        query = gl.arange(0, ROWS, of_row)
        gl.store(peak_ptr + part + query, top, mask=query < group)
        gl.store(weight_ptr + part + query, weight, mask=query < group)


@gluon.jit
def _merge(
    sums_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, position_ptr, out_ptr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr,
    ROWS: gl.constexpr, HEADS: gl.constexpr, QUARTER: gl.constexpr, GROUP: gl.constexpr,
    CHUNK: gl.constexpr, SPLITS: gl.constexpr, WIDTH: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """Of a tile and KV head: adds the parts by their softmax weights, WIDTH of them at a time, and
    rotates the result back."""
    DIM: gl.constexpr = 4 * QUARTER
    group: gl.constexpr = q_heads // kv_heads
    wide: gl.constexpr = gl.BlockedLayout(
        [WIDTH, 1, 1], [1, 1, 32], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    flat: gl.constexpr = gl.SliceLayout(0, wide)
    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    length = gl.load(length_ptr + tile)
    token = gl.load(first_ptr + tile).to(gl.int64)
    _, _, units = _units(gl.load(position_ptr + tile), GROUP, CHUNK)
    per_split = (units + SPLITS - 1) // SPLITS
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length == 0:
        return
    used = (units + per_split - 1) // per_split
    number = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    number = gl.expand_dims(gl.expand_dims(number, 1), 2)
    head = gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(1, flat)), 1)
    dim = gl.expand_dims(gl.arange(0, QUARTER, gl.SliceLayout(0, flat)), 0)
    first = (tile * kv_heads + kv_head).to(gl.int64) * (SPLITS * ROWS)
    own = gl.expand_dims(gl.minimum(head, group - 1) + dim * 0, 0)
    peak = gl.full([HEADS, QUARTER], _MASKED, gl.float32, flat)
    weight = gl.zeros([HEADS, QUARTER], gl.float32, flat)
    x0 = weight
    x1 = weight
    x2 = weight
    x3 = weight
    for begin in range(0, used, WIDTH):
        part = first + (begin + number) * ROWS + own
        there = (begin + number < used) & (own >= 0)
        peaks = gl.load(peak_ptr + part, mask=there, other=_MASKED)
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
    x0, x1, x2, x3 = _rotated(x0 * share, x1 * share, x2 * share, x3 * share)
    target = out_ptr + (token * q_heads + kv_head * group + head) * DIM
    _store_heads(target, x0, x1, x2, x3, head < group)


def fits(qkv: Array, kv: KVarNKV, dtype: DTypeLike) -> bool:
    """Whether this kernel is for such a step; others are left to `triton_attention`."""
    _, _, kv_heads, group, quarter = kv.key_words.shape
    _, tokens, width = qkv.shape
    heads = width // (4 * quarter * kv_heads)  # with a key's and a value's
    return (
        tokens <= MAX_TOKENS
        and dtype == jnp.bfloat16
        and (group, quarter) == (_GROUP, _QUARTER)
        and heads <= _ROWS
    )


def heuristic(*, tiles: int, kv_heads: int) -> Config:
    """A configuration for so many single tokens."""
    splits = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), 64))
    return Config(splits=splits, num_warps=4, num_stages=2)


def attend(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    config: Config | None = None,
) -> tuple[Array, KVarNKV]:
    """`kv_format.attend` of single tokens: the result, and kv with their keys and values."""
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    parts, tokens, width = qkv.shape
    head_dim, dtype, tiles = 4 * quarter, norms[0].dtype, step.tiles.in_one_list()
    q_heads, num_tiles = width // head_dim - 2 * kv_heads, tiles.first.shape[0]
    config = config or heuristic(tiles=num_tiles, kv_heads=kv_heads)
    grid = (num_tiles, kv_heads, config.splits)
    whole = jax.ShapeDtypeStruct((tokens, q_heads, head_dim), dtype)
    shared = {
        "q_heads": q_heads, "kv_heads": kv_heads, "ROWS": _ROWS, "QUARTER": quarter,
        "GROUP": group, "CHUNK": _CHUNK, "SPLITS": config.splits,
    }  # fmt: skip
    raw = jax.new_ref(kv.raw)
    out, *found = triton_call(
        qkv, *norms, *tables, kv.key_words, kv.value_words, kv.scales, raw,
        step.page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_kvarn_inputs",
        out_type=(whole, *part_types((*grid, _ROWS) if config.splits > 1 else (1,), head_dim)),
        grid=grid,
        num_warps=config.num_warps, STAGES=config.num_stages,
        first_page=layer * num_pages, first_slot=layer * kv.raw.shape[1],
        table_stride=step.page_table.shape[1], stride=tokens * width, parts=parts, eps=eps,
        scale=head_dim**-0.5 * LOG2_E, BITS=kv.value_bits, **shared,
    )  # fmt: skip
    if config.splits > 1:
        out = triton_call(
            *found, tiles.first, tiles.length, tiles.position,
            kernel=_merge,
            name="paged_attention_kvarn_inputs_merge",
            out_type=whole,
            grid=grid[:2],
            num_warps=4,
            HEADS=max(4, triton.next_power_of_2(q_heads // kv_heads)),
            WIDTH=min(8, triton.next_power_of_2(config.splits)), **shared,
        )  # fmt: skip
    return out, kv._replace(raw=jax.freeze(raw))
