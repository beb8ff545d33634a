"""Copies pages of keys and values to shared memory, and attends to one of them.

Each warp takes a quarter of a page's keys and has its own peak, weights and sums. The first axis of
these, and of the products, is that of warps. Rows of products are keys or channels, columns are
queries. So warps wait for each other only for copies.

A page is one stage of a ring: tiles [page, half] of 16-bit words, keys before values. In bfloat16
each half of the heads is a tile. In 8 bits there is one tile, whose words hold an element of each
half.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

MASKED = gl.constexpr(-1.0e30)

BF16 = gl.constexpr(0)
INT8 = gl.constexpr(1)
FP8 = gl.constexpr(2)
"""Kinds of keys and values."""

LIFT = gl.constexpr(256.0)
"""Factor on int8's value scales. It keeps probabilities times scales within float16's normal
numbers, as long as they matter. No scale exceeds float16's 65,504 / 256."""


@gluon.jit
def int8_halves(words):
    """The bytes of words minus 128. A byte becomes the low bits of the mantissa of 1,024 in
    float16; then 1,152 is subtracted."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a,b,k; mov.b32 k,0x64806480;
        prmt.b32 a,$2,0x64646464,0x4240; prmt.b32 b,$2,0x64646464,0x4341;
        sub.f16x2 $0,a,k; sub.f16x2 $1,b,k; }""",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def e4m3_halves(words):
    """The e4m3 numbers of the bytes of words, exact in float16."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 x,y; .reg .b32 a; prmt.b32 a,$2,0,0x3120; mov.b32 {x,y},a;
        cvt.rn.f16x2.e4m3x2 $0,x; cvt.rn.f16x2.e4m3x2 $1,y; }""",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def pages_of_split(
    position, split,
    PAGE: gl.constexpr, SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """For the token at `position`: the split's first page and the page after its last one; whether
    the split contains the token's own page; the number of pages that the token sees, and the number
    per split. If begin >= end the split has no pages."""
    blocks = position // PAGE + 1
    if WINDOW:
        before = gl.maximum(position - WINDOW + 1, 0) // PAGE
        blocks -= before
    per_split = gl.maximum((blocks + SPLITS - 1) // SPLITS, MIN_BLOCKS)
    begin = split * per_split
    end = gl.minimum(begin + per_split, blocks)
    owner = end == blocks
    if WINDOW:
        begin += before
        end += before
    return begin, end, owner, blocks, per_split


@gluon.jit
def copy_page(
    kv_ptr, scales_ptr, row, held, tiles, scales,
    PAGE: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr, WINDOW: gl.constexpr = 0,
):  # fmt: skip
    """Copies keys and values of the page that begins at row `row`, and int8's scales. Only the
    first `held` tokens inside the window of the next token are copied, zeros elsewhere."""
    copy: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // HALF, HALF // 8], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    rows: gl.constexpr = gl.SliceLayout(0, copy)
    WIDTH: gl.constexpr = tiles.shape[0] // 2 * HALF
    tile = gl.arange(0, tiles.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    key = gl.arange(0, PAGE, gl.SliceLayout(1, rows))
    word = gl.arange(0, HALF, gl.SliceLayout(0, rows))
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2)
    key = gl.expand_dims(gl.expand_dims(key, 1), 0)
    source = kv_ptr.to(gl.pointer_type(gl.int16), bitcast=True) + row * WIDTH
    if KIND == BF16:
        source += tile // 2 * (PAGE * WIDTH) + tile % 2 * HALF
    else:
        source += tile * (PAGE * WIDTH)
    source += key * WIDTH + gl.expand_dims(gl.expand_dims(word, 0), 0)
    there = key < held
    if WINDOW:
        there = there & (key > held - WINDOW)
    async_copy.async_load(tiles, source, mask=there)
    if KIND == INT8:
        flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, gl.num_warps() // 2], [1, 0])
        side = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, flat)), 1)
        key = gl.expand_dims(gl.arange(0, PAGE, gl.SliceLayout(0, flat)), 0)
        source = scales_ptr + row + side * PAGE + key
        there = key < held
        if WINDOW:
            there = there & (key > held - WINDOW)
        async_copy.async_load(scales, source, mask=there)


@gluon.jit
def for_each_warp(memory, layout: gl.constexpr):
    """Loads queries [rows, channels] from shared memory as the operand of every warp: [warps,
    channels, rows]."""
    x = memory.permute((1, 0)).load(gl.SliceLayout(0, layout))
    shape: gl.constexpr = [gl.num_warps(), x.shape[0], x.shape[1]]
    return gl.expand_dims(x, 0).broadcast_to(shape)


@gluon.jit
def _halves(tiles, first, TRANSPOSED: gl.constexpr, left: gl.constexpr, KIND: gl.constexpr):
    """Loads both halves of keys or values, in the dtype of products."""
    low = tiles.index(first)
    if TRANSPOSED:
        low = low.permute((0, 2, 1))
    if KIND == BF16:
        high = tiles.index(first + 1)
        if TRANSPOSED:
            high = high.permute((0, 2, 1))
        a = low.load(left).to(gl.bfloat16, bitcast=True)
        b = high.load(left).to(gl.bfloat16, bitcast=True)
    elif KIND == INT8:
        a, b = int8_halves(low.load(left))
    else:
        a, b = e4m3_halves(low.load(left))
    return a, b


@gluon.jit
def visit_page(
    tiles, scales, stage, held, q_low, q_high, peak, weights, acc_low, acc_high, scale,
    KIND: gl.constexpr, WINDOW: gl.constexpr = 0,
):  # fmt: skip
    """Visits a page, a quarter of its keys per warp. Keys after the first `held` are masked."""
    layout: gl.constexpr = weights.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    by_key: gl.constexpr = gl.SliceLayout(2, layout)
    TILES: gl.constexpr = 2 if KIND == BF16 else 1
    low, high = _halves(tiles, 2 * TILES * stage, False, left, KIND)
    scores = mma_v2(low, q_low, gl.zeros_like(weights))
    scores = mma_v2(high, q_high, scores)
    if KIND == INT8:
        scores *= gl.expand_dims(scales.index(2 * stage).load(by_key) * scale, 2)
    else:
        scores *= scale
    of_warp = gl.arange(0, weights.shape[0], gl.SliceLayout(1, by_key))
    key = gl.arange(0, weights.shape[1], gl.SliceLayout(0, by_key))
    key = gl.expand_dims(of_warp, 1) * weights.shape[1] + gl.expand_dims(key, 0)
    scores = gl.where(gl.expand_dims(key < held, 2), scores, MASKED)
    if WINDOW:
        scores = gl.where(gl.expand_dims(key > held - WINDOW, 2), scores, MASKED)
    before = peak
    peak = gl.maximum(peak, gl.max(scores, axis=1))
    probs = gl.exp2(scores - gl.expand_dims(peak, 1))
    shrink = gl.expand_dims(gl.exp2(before - peak), 1)
    weights = weights * shrink + probs
    if KIND == INT8:
        probs *= gl.expand_dims(scales.index(2 * stage + 1).load(by_key) * LIFT, 2)
    p = gl.convert_layout(probs.to(q_low.dtype), right)
    low, high = _halves(tiles, (2 * stage + 1) * TILES, True, left, KIND)
    acc_low = mma_v2(low, p, acc_low * shrink)
    acc_high = mma_v2(high, p, acc_high * shrink)
    return peak, weights, acc_low, acc_high


@gluon.jit
def of_all_warps(found, peaks, weights, layout: gl.constexpr):
    """Adds the warps' results by their softmax weights. Returns halves [rows, half], and the peak
    and weight [rows] of the sum. In shared memory sums are [halves * warps, rows, half], peaks and
    weights [warps, rows]."""
    WARPS: gl.constexpr = gl.num_warps()
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    top = peaks.index(0).load(of_row)
    for warp in gl.static_range(1, WARPS):
        top = gl.maximum(top, peaks.index(warp).load(of_row))
    weight = gl.zeros_like(top)
    low = gl.expand_dims(weight, 1)
    high = low
    for warp in gl.static_range(WARPS):
        share = gl.exp2(peaks.index(warp).load(of_row) - top)
        weight += weights.index(warp).load(of_row) * share
        share = gl.expand_dims(share, 1)
        low += found.index(warp).load(layout) * share
        high += found.index(WARPS + warp).load(layout) * share
    return low, high, top, weight
