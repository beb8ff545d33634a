"""Attention of a token's heads over the keys of one page. Products take codes; scales are moved to
the codes' other factor.

For a packed tile, with queries q and probabilities p::

    score[g]  = column[g] * (sum_d (q[d] * scale[d]) * code[g, d] + sum_d q[d] * zero[d])
    out[d]   += column[d] * (sum_g (p[g] * scale[g]) * code[g, d] + sum_g p[g] * zero[g])

A code enters as the bfloat16 number 128 + code, which one instruction makes. The excess of 128 is
subtracted again, with the factors as they were rounded. Zeros are shifted to the middle of the
codes' range, so that rounding the factors costs little.

A head is processed in four quarters, as its codes are packed in words. Keys and channels are the
rows of products and queries their columns, so codes go from shared memory to registers to the
tensor cores without reordering.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNPACK_4 = tl.constexpr("""{ .reg .b32 a,b,c; shr.u32 a,$4,4; shr.u32 b,$4,8; shr.u32 c,$4,12;
    lop3.b32 $0,$4,0x000f000f,0x43004300,0xea; lop3.b32 $1,a,0x000f000f,0x43004300,0xea;
    lop3.b32 $2,b,0x000f000f,0x43004300,0xea; lop3.b32 $3,c,0x000f000f,0x43004300,0xea; }""")
_UNPACK_2 = tl.constexpr("""{ .reg .b32 a,b,c; shr.u32 a,$4,2; shr.u32 b,$4,4; shr.u32 c,$4,6;
    lop3.b32 $0,$4,0x00030003,0x43004300,0xea; lop3.b32 $1,a,0x00030003,0x43004300,0xea;
    lop3.b32 $2,b,0x00030003,0x43004300,0xea; lop3.b32 $3,c,0x00030003,0x43004300,0xea; }""")
_UNPACK_2_LATE = tl.constexpr("""{ .reg .b32 a,b,c,d; shr.u32 a,$4,8; shr.u32 b,$4,10;
    shr.u32 c,$4,12; shr.u32 d,$4,14;
    lop3.b32 $0,a,0x00030003,0x43004300,0xea; lop3.b32 $1,b,0x00030003,0x43004300,0xea;
    lop3.b32 $2,c,0x00030003,0x43004300,0xea; lop3.b32 $3,d,0x00030003,0x43004300,0xea; }""")
"""PTX that turns a register of two words into four pairs of bfloat16 numbers 128 + code: for 4-bit
codes, and for 2-bit codes in the low or the high byte."""


@triton.jit
def code_quarters(words, HALF: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """The codes of the four quarters of half a tile; plus 128 if FAST."""
    if FAST:
        asm: tl.constexpr = _UNPACK_4 if BITS == 4 else (_UNPACK_2_LATE if HALF else _UNPACK_2)
        a, b, c, d = tl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,r", [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        MASK: tl.constexpr = (1 << BITS) - 1
        wide = words.to(tl.int32) >> (0 if BITS == 4 else 8 * HALF)
        a = (wide & MASK).to(tl.float32)
        b = ((wide >> BITS) & MASK).to(tl.float32)
        c = ((wide >> (2 * BITS)) & MASK).to(tl.float32)
        d = ((wide >> (3 * BITS)) & MASK).to(tl.float32)
    return a, b, c, d


@triton.jit
def _dot4(x0, x1, x2, x3, y0, y1, y2, y3):
    """Sum of the products of x [keys, quarter] with y [quarter, queries]."""
    out = tl.dot(x0, y0, input_precision="ieee")
    out = tl.dot(x1, y1, out, input_precision="ieee")
    out = tl.dot(x2, y2, out, input_precision="ieee")
    return tl.dot(x3, y3, out, input_precision="ieee")


@triton.jit
def float16_pair(words):
    """The float16 numbers in the low and the high half of words, in float32."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _scaled_query(q, scales, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """One quarter of q [quarter, queries] times the keys' scales, rounded; and the contribution of
    zeros and offset to scores, by channel."""
    scale, zero = float16_pair(scales)
    wide = q.to(tl.float32)
    factor = (wide * scale[:, None]).to(dtype)
    return factor, wide * (zero + 7.5 * scale)[:, None] - OFFSET * factor.to(tl.float32)


@triton.jit
def _scaled_queries(
    q0, q1, q2, q3, words, QUARTER: tl.constexpr, dtype: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """`_scaled_query` for all quarters, and the contribution of zeros and offset to scores."""
    words += tl.arange(0, QUARTER)
    f0, r0 = _scaled_query(q0, tl.load(words), dtype, OFFSET)
    f1, r1 = _scaled_query(q1, tl.load(words + QUARTER), dtype, OFFSET)
    f2, r2 = _scaled_query(q2, tl.load(words + 2 * QUARTER), dtype, OFFSET)
    f3, r3 = _scaled_query(q3, tl.load(words + 3 * QUARTER), dtype, OFFSET)
    return f0, f1, f2, f3, tl.sum((r0 + r1) + (r2 + r3), axis=0)


@triton.jit
def _key_scores(
    words_at, f0, f1, f2, f3, rest, column, scale: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Scores [keys, queries] of half of a tile's keys."""
    k0, k1, k2, k3 = code_quarters(tl.load(words_at), 0, 4, FAST)
    scores = _dot4(k0, k1, k2, k3, f0, f1, f2, f3)
    return (scores + rest[None, :]) * (column * scale)[:, None]


@triton.jit
def _value_factors(
    scores, peak, scales, dtype: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr
):  # fmt: skip
    """Probabilities; probabilities times the values' scales, rounded; and the contribution of zeros
    and offset, by key."""
    probs = tl.exp2(scores - peak[None, :])
    scale, zero = float16_pair(scales)
    factor = (probs * scale[:, None]).to(dtype)
    rest = probs * (zero + MIDDLE * scale)[:, None] - OFFSET * factor.to(tl.float32)
    return probs, factor, rest


@triton.jit
def _add_values(
    words_at, factor, r0, r1, r2, r3, HALF: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr
):
    """Adds half of a tile's values, [quarter, keys], times their factors [keys, queries]."""
    v0, v1, v2, v3 = code_quarters(tl.load(words_at), HALF, BITS, FAST)
    r0 = tl.dot(v0, factor, r0, input_precision="ieee")
    r1 = tl.dot(v1, factor, r1, input_precision="ieee")
    r2 = tl.dot(v2, factor, r2, input_precision="ieee")
    r3 = tl.dot(v3, factor, r3, input_precision="ieee")
    return r0, r1, r2, r3


@triton.jit
def packed_keys(
    page, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    key_words_ptr, value_words_ptr, scales_ptr, kv_head,
    scale: tl.constexpr, kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    BITS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Visits one tile of codes, one half of its keys after the other. The halves share words."""
    DIM: tl.constexpr = 4 * QUARTER
    LATER: tl.constexpr = GROUP // 2
    MIDDLE: tl.constexpr = ((1 << BITS) - 1) / 2
    ADDED: tl.constexpr = 128.0 if FAST else 0.0
    dtype: tl.constexpr = tl.bfloat16 if FAST else tl.float32
    dim = tl.arange(0, QUARTER)
    key = tl.arange(0, LATER)
    head_page = page * kv_heads + kv_head
    keys = key_words_ptr + head_page * (GROUP * QUARTER) + key[:, None] * QUARTER + dim[None, :]
    values = value_words_ptr + head_page * (GROUP * BITS // 4 * QUARTER)
    values += key[None, :] * QUARTER + dim[:, None]
    # Words of two scales: [DIM] of keys, [DIM/2] and [GROUP/2] of columns, [GROUP] of values.
    words = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words += head_page * (3 * (DIM + GROUP) // 2)
    f0, f1, f2, f3, rest = _scaled_queries(q0, q1, q2, q3, words, QUARTER, dtype, ADDED + 7.5)
    words += DIM
    c0, c2 = float16_pair(tl.load(words + dim))
    c1, c3 = float16_pair(tl.load(words + QUARTER + dim))
    words += DIM // 2
    low, high = float16_pair(tl.load(words + key))
    words += LATER + key
    s0 = _key_scores(keys, f0, f1, f2, f3, rest, low, scale, FAST)
    s1 = _key_scores(keys + LATER * QUARTER, f0, f1, f2, f3, rest, high, scale, FAST)
    new_peak = tl.maximum(peak, tl.max(tl.maximum(s0, s1), axis=0))
    p0, w0, rest0 = _value_factors(s0, new_peak, tl.load(words), dtype, ADDED + MIDDLE, MIDDLE)
    p1, w1, rest1 = _value_factors(
        s1, new_peak, tl.load(words + LATER), dtype, ADDED + MIDDLE, MIDDLE
    )
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(p0 + p1, axis=0)
    rest = tl.sum(rest0 + rest1, axis=0)[None, :]
    none = tl.zeros([QUARTER, peak.shape[0]], tl.float32)
    r0, r1, r2, r3 = _add_values(values, w0, none, none, none, none, 0, BITS, FAST)
    if BITS == 4:
        values += LATER * QUARTER
    r0, r1, r2, r3 = _add_values(values, w1, r0, r1, r2, r3, 1, BITS, FAST)
    shrink = shrink[None, :]
    acc0 = acc0 * shrink + (r0 + rest) * c0[:, None]
    acc1 = acc1 * shrink + (r1 + rest) * c1[:, None]
    acc2 = acc2 * shrink + (r2 + rest) * c2[:, None]
    acc3 = acc3 * shrink + (r3 + rest) * c3[:, None]
    return new_peak, weight, acc0, acc1, acc2, acc3


@triton.jit
def raw_keys(
    held, keys, values, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    scale: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """Visits keys in full precision. Pointers are `keys` [keys, quarter] and `values` [quarter,
    keys]. Keys that are not `held` are masked."""
    seen = held[:, None]
    k0 = tl.load(keys, mask=seen, other=0.0)
    k1 = tl.load(keys + QUARTER, mask=seen, other=0.0)
    k2 = tl.load(keys + 2 * QUARTER, mask=seen, other=0.0)
    k3 = tl.load(keys + 3 * QUARTER, mask=seen, other=0.0)
    columns = held[None, :]
    v0 = tl.load(values, mask=columns, other=0.0)
    v1 = tl.load(values + QUARTER, mask=columns, other=0.0)
    v2 = tl.load(values + 2 * QUARTER, mask=columns, other=0.0)
    v3 = tl.load(values + 3 * QUARTER, mask=columns, other=0.0)
    scores = _dot4(k0, k1, k2, k3, q0, q1, q2, q3) * scale
    scores = tl.where(seen, scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=0))
    probs = tl.where(seen, tl.exp2(scores - new_peak[None, :]), 0.0)
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=0)
    probs = probs.to(q0.dtype)
    shrink = shrink[None, :]
    acc0 = tl.dot(v0, probs, acc0 * shrink, input_precision="ieee")
    acc1 = tl.dot(v1, probs, acc1 * shrink, input_precision="ieee")
    acc2 = tl.dot(v2, probs, acc2 * shrink, input_precision="ieee")
    acc3 = tl.dot(v3, probs, acc3 * shrink, input_precision="ieee")
    return new_peak, weight, acc0, acc1, acc2, acc3
