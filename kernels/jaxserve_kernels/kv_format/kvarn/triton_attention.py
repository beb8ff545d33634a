"""Attention over a KVarN cache: codes go into the products, scales to their other factor.

Of a packed tile, with q and p the rows' queries and probabilities::

    score[g]  = column[g] * (sum_d (q[d] * scale[d]) * code[g, d] + sum_d q[d] * zero[d])
    out[d]   += column[d] * (sum_g (p[g] * scale[g]) * code[g, d] + sum_g p[g] * zero[g])

A code enters as the bfloat16 number 128 + code, which takes one instruction to make; what that
adds is taken off again with the factors as they were rounded. Zeros are moved to the middle of the
codes' range, so that rounding the factors costs little.

A head is four quarters, because that is how its codes lie in words.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_inputs import signs
from jaxserve_kernels.kv_format.triton_parts import LOG2_E, merge_splits
from jaxserve_kernels.paged_attention.config import Config
from jaxserve_kernels.triton_call import triton_call

_TARGET_PROGRAMS = 528


@triton.jit
def _quarters_4(words):
    """128 + each of the four nibbles, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a,b,c; shr.u32 a,$4,4; shr.u32 b,$4,8; shr.u32 c,$4,12;
        lop3.b32 $0,$4,0x000f000f,0x43004300,0xea; lop3.b32 $1,a,0x000f000f,0x43004300,0xea;
        lop3.b32 $2,b,0x000f000f,0x43004300,0xea; lop3.b32 $3,c,0x000f000f,0x43004300,0xea; }""",
        "=r,=r,=r,=r,r", [words],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _quarters_2_low(words):
    """128 + each of the four codes in the low byte, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a,b,c; shr.u32 a,$4,2; shr.u32 b,$4,4; shr.u32 c,$4,6;
        lop3.b32 $0,$4,0x00030003,0x43004300,0xea; lop3.b32 $1,a,0x00030003,0x43004300,0xea;
        lop3.b32 $2,b,0x00030003,0x43004300,0xea; lop3.b32 $3,c,0x00030003,0x43004300,0xea; }""",
        "=r,=r,=r,=r,r", [words],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _quarters_2_high(words):
    """128 + each of the four codes in the high byte, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a,b,c,d; shr.u32 a,$4,8; shr.u32 b,$4,10; shr.u32 c,$4,12; shr.u32 d,$4,14;
        lop3.b32 $0,a,0x00030003,0x43004300,0xea; lop3.b32 $1,b,0x00030003,0x43004300,0xea;
        lop3.b32 $2,c,0x00030003,0x43004300,0xea; lop3.b32 $3,d,0x00030003,0x43004300,0xea; }""",
        "=r,=r,=r,=r,r", [words],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _quarters(words, HALF: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """The codes of the four quarters of half a tile; 128 more if FAST."""
    if FAST:
        if BITS == 4:
            a, b, c, d = _quarters_4(words)
        elif HALF == 0:
            a, b, c, d = _quarters_2_low(words)
        else:
            a, b, c, d = _quarters_2_high(words)
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
    """Sum of the products of x [rows, quarter] with y [keys, quarter], transposed."""
    out = tl.dot(x0, tl.trans(y0), input_precision="ieee")
    out = tl.dot(x1, tl.trans(y1), out, input_precision="ieee")
    out = tl.dot(x2, tl.trans(y2), out, input_precision="ieee")
    return tl.dot(x3, tl.trans(y3), out, input_precision="ieee")


@triton.jit
def _scaled_query(q, scales, DIM: tl.constexpr, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """One quarter of q times the keys' scales, rounded; and what zeros and offset add to scores."""
    scale = tl.load(scales).to(tl.float32)[None, :]
    zero = tl.load(scales + DIM).to(tl.float32)[None, :]
    wide = q.to(tl.float32)
    factor = (wide * scale).to(dtype)
    rest = wide * (zero + 7.5 * scale) - OFFSET * factor.to(tl.float32)
    return factor, tl.sum(rest, axis=1)


@triton.jit
def _packed_page(
    page, visible, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    key_words_ptr, value_words_ptr, scales_ptr, kv_head,
    scale: tl.constexpr, kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    BITS: tl.constexpr, FAST: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of codes; with MASK only `visible` rows see it."""
    DIM: tl.constexpr = 4 * QUARTER
    KEYS: tl.constexpr = GROUP // 2
    VALUE_ROWS: tl.constexpr = GROUP * BITS // 4
    ADDED: tl.constexpr = 128.0 if FAST else 0.0
    MIDDLE: tl.constexpr = ((1 << BITS) - 1) / 2
    dtype: tl.constexpr = tl.bfloat16 if FAST else tl.float32
    dim = tl.arange(0, QUARTER)
    key = tl.arange(0, KEYS)
    head_page = page * kv_heads + kv_head
    scales = scales_ptr + head_page * (3 * (DIM + GROUP))
    f0, rest = _scaled_query(q0, scales + dim, DIM, dtype, ADDED + 7.5)
    f1, more = _scaled_query(q1, scales + QUARTER + dim, DIM, dtype, ADDED + 7.5)
    rest += more
    f2, more = _scaled_query(q2, scales + 2 * QUARTER + dim, DIM, dtype, ADDED + 7.5)
    rest += more
    f3, more = _scaled_query(q3, scales + 3 * QUARTER + dim, DIM, dtype, ADDED + 7.5)
    rest += more
    column = scales + 2 * DIM + dim
    c0 = tl.load(column).to(tl.float32)[None, :]
    c1 = tl.load(column + QUARTER).to(tl.float32)[None, :]
    c2 = tl.load(column + 2 * QUARTER).to(tl.float32)[None, :]
    c3 = tl.load(column + 3 * QUARTER).to(tl.float32)[None, :]
    key_at = key_words_ptr + head_page * (GROUP * QUARTER) + key[:, None] * QUARTER + dim[None, :]
    value_at = value_words_ptr + head_page * (VALUE_ROWS * QUARTER)
    value_at += key[:, None] * QUARTER + dim[None, :]
    for half in tl.static_range(2):
        words = tl.load(key_at + half * (KEYS * QUARTER))
        k0, k1, k2, k3 = _quarters(words, half, 4, FAST)
        scores = _dot4(f0, f1, f2, f3, k0, k1, k2, k3)
        per_key = scales + 3 * DIM + half * KEYS + key
        key_column = tl.load(per_key).to(tl.float32) * scale
        scores = (scores + rest[:, None]) * key_column[None, :]
        if MASK:
            scores = tl.where(visible[:, None], scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        probs = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        if MASK:
            probs = tl.where(visible[:, None], probs, 0.0)
        peak = new_peak
        weight = weight * shrink + tl.sum(probs, axis=1)
        value_scale = tl.load(per_key + GROUP).to(tl.float32)[None, :]
        value_zero = tl.load(per_key + 2 * GROUP).to(tl.float32)[None, :]
        factor = (probs * value_scale).to(dtype)
        left = probs * (value_zero + MIDDLE * value_scale)
        left -= (ADDED + MIDDLE) * factor.to(tl.float32)
        left = tl.sum(left, axis=1)[:, None]
        words = tl.load(value_at + (half * (KEYS * QUARTER) if BITS == 4 else 0))
        v0, v1, v2, v3 = _quarters(words, half, BITS, FAST)
        shrink = shrink[:, None]
        acc0 = acc0 * shrink + (tl.dot(factor, v0, input_precision="ieee") + left) * c0
        acc1 = acc1 * shrink + (tl.dot(factor, v1, input_precision="ieee") + left) * c1
        acc2 = acc2 * shrink + (tl.dot(factor, v2, input_precision="ieee") + left) * c2
        acc3 = acc3 * shrink + (tl.dot(factor, v3, input_precision="ieee") + left) * c3
    return peak, weight, acc0, acc1, acc2, acc3


@triton.jit
def _raw_quarter(kept, fresh, here, held, FRESH: tl.constexpr):
    """One quarter of keys or values, from the step where `here`, otherwise from the slot."""
    if FRESH:
        x = tl.load(kept, mask=held & (here == 0), other=0.0)
        x = tl.where(here, tl.load(fresh, mask=here, other=0.0), x)
    else:
        x = tl.load(kept, mask=held, other=0.0)
    return x


@triton.jit
def _raw_page(
    page, everyone, tile_first, tile_position, end, slot, row_position,
    q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    raw_ptr, fresh_ptr, slot_ptr, position_ptr, first_slot, kv_head, num_tokens,
    scale: tl.constexpr, kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    FRESH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The keys of one page in full precision, for rows of that page or, if `everyone`, of all."""
    DIM: tl.constexpr = 4 * QUARTER
    KEYS: tl.constexpr = GROUP // 2
    dim = tl.arange(0, QUARTER)[None, :]
    tile = (first_slot + slot).to(tl.int64) * 2 + tl.where(page > 0, 1, 0)
    mine = everyone | (row_position // GROUP == page)
    for half in tl.static_range(2):
        offset = half * KEYS + tl.arange(0, KEYS)
        key_position = page * GROUP + offset
        held = (key_position < end)[:, None]
        kept = raw_ptr + ((tile * kv_heads + kv_head) * 2 * GROUP + offset)[:, None] * DIM + dim
        fresh = fresh_ptr + 0 * offset[:, None]
        here = held
        if FRESH:
            source = tile_first + key_position - tile_position
            maybe = (source >= 0) & (source < num_tokens)
            same = tl.load(slot_ptr + source, mask=maybe, other=-1) == slot
            found = tl.load(position_ptr + source, mask=maybe, other=-1)
            here = (maybe & same & (found == key_position))[:, None] & held
            at = (source.to(tl.int64) * kv_heads + kv_head) * (2 * DIM)
            fresh = fresh_ptr + at[:, None] + dim
        k0 = _raw_quarter(kept, fresh, here, held, FRESH)
        k1 = _raw_quarter(kept + QUARTER, fresh + QUARTER, here, held, FRESH)
        k2 = _raw_quarter(kept + 2 * QUARTER, fresh + 2 * QUARTER, here, held, FRESH)
        k3 = _raw_quarter(kept + 3 * QUARTER, fresh + 3 * QUARTER, here, held, FRESH)
        scores = _dot4(q0, q1, q2, q3, k0, k1, k2, k3) * scale
        seen = mine[:, None] & (key_position[None, :] <= row_position[:, None])
        scores = tl.where(seen, scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        probs = tl.where(seen, tl.exp2(scores - new_peak[:, None]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        peak = new_peak
        weight = weight * shrink + tl.sum(probs, axis=1)
        probs = probs.to(q0.dtype)
        kept += GROUP * DIM
        fresh += DIM
        v0 = _raw_quarter(kept, fresh, here, held, FRESH)
        v1 = _raw_quarter(kept + QUARTER, fresh + QUARTER, here, held, FRESH)
        v2 = _raw_quarter(kept + 2 * QUARTER, fresh + 2 * QUARTER, here, held, FRESH)
        v3 = _raw_quarter(kept + 3 * QUARTER, fresh + 3 * QUARTER, here, held, FRESH)
        shrink = shrink[:, None]
        acc0 = tl.dot(probs, v0, acc0 * shrink, input_precision="ieee")
        acc1 = tl.dot(probs, v1, acc1 * shrink, input_precision="ieee")
        acc2 = tl.dot(probs, v2, acc2 * shrink, input_precision="ieee")
        acc3 = tl.dot(probs, v3, acc3 * shrink, input_precision="ieee")
    return peak, weight, acc0, acc1, acc2, acc3


@triton.jit
def _attend(
    q_ptr, fresh_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr, slot_ptr, position_ptr,
    table_ptr, cached_ptr, tile_first_ptr, tile_length_ptr, tile_slot_ptr, tile_position_ptr,
    out_ptr, peak_ptr, weight_ptr,
    layer, num_pages, num_slots, table_stride, num_tokens,
    scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FRESH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    DIM: tl.constexpr = 4 * QUARTER
    length = tl.load(tile_length_ptr + tile)
    if length > 0:
        position = tl.load(tile_position_ptr + tile)
        first = tl.load(tile_first_ptr + tile)
        slot = tl.load(tile_slot_ptr + tile)
        table = table_ptr + slot.to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, QUARTER)
        token = row // group
        valid = token < tl.minimum(length, tile_size)
        q_row = (first.to(tl.int64) + token) * q_heads + kv_head * group + row % group
        q_at = q_ptr + q_row[:, None] * DIM + dim[None, :]
        q0 = tl.load(q_at, mask=valid[:, None], other=0.0)
        q1 = tl.load(q_at + QUARTER, mask=valid[:, None], other=0.0)
        q2 = tl.load(q_at + 2 * QUARTER, mask=valid[:, None], other=0.0)
        q3 = tl.load(q_at + 3 * QUARTER, mask=valid[:, None], other=0.0)
        row_position = position + tl.minimum(token, length - 1)
        row_page = row_position // GROUP
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc1 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc2 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc3 = tl.zeros([ROWS, QUARTER], tl.float32)

        own_sink = tl.load(cached_ptr + slot) == 0
        end = position + length
        first_page = position // GROUP  # of the tile's first row
        pages = tl.cdiv(end, GROUP)
        per_split = tl.cdiv(pages, SPLITS)
        begin = split * per_split
        stop = tl.minimum(begin + per_split, pages)
        page_base = (layer * num_pages).to(tl.int64)
        packed_from = tl.maximum(begin, tl.where(own_sink, 1, 0))
        for index in tl.range(packed_from, tl.minimum(stop, first_page), num_stages=STAGES):
            page = page_base + tl.load(table + index)
            peak, weight, acc0, acc1, acc2, acc3 = _packed_page(
                page, valid, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                key_words_ptr, value_words_ptr, scales_ptr, kv_head,
                scale, kv_heads, GROUP, QUARTER, BITS, FAST, False,
            )  # fmt: skip
        if tile_size > 1:  # pages that only the tile's later rows see as codes
            for index in tl.range(
                tl.maximum(packed_from, first_page), tl.minimum(stop, pages - 1), num_stages=1
            ):
                page = page_base + tl.load(table + index)
                peak, weight, acc0, acc1, acc2, acc3 = _packed_page(
                    page, row_page > index, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                    key_words_ptr, value_words_ptr, scales_ptr, kv_head,
                    scale, kv_heads, GROUP, QUARTER, BITS, FAST, True,
                )  # fmt: skip
        # Page 0 if it is this split's and the sequence's own, then the rows' own pages.
        sink = (begin == 0) & own_sink & (first_page > 0)
        own_from = tl.maximum(begin, first_page)
        raw_pages = tl.maximum(stop - own_from, 0)
        for number in range(tl.where(sink, -1, 0), raw_pages):
            index = tl.where(number < 0, 0, own_from + number)
            peak, weight, acc0, acc1, acc2, acc3 = _raw_page(
                index, own_sink & (index == 0), first, position, end, slot, row_position,
                q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                raw_ptr, fresh_ptr, slot_ptr, position_ptr, layer * num_slots, kv_head,
                num_tokens, scale, kv_heads, GROUP, QUARTER, FRESH, FAST,
            )  # fmt: skip

        # Back from the rotated basis: within the quarters, then across them.
        matrix = signs(QUARTER, tl.float32)
        if FAST:
            acc0 = tl.dot(acc0, matrix, input_precision="tf32")
            acc1 = tl.dot(acc1, matrix, input_precision="tf32")
            acc2 = tl.dot(acc2, matrix, input_precision="tf32")
            acc3 = tl.dot(acc3, matrix, input_precision="tf32")
        else:
            acc0 = tl.dot(acc0, matrix, input_precision="ieee")
            acc1 = tl.dot(acc1, matrix, input_precision="ieee")
            acc2 = tl.dot(acc2, matrix, input_precision="ieee")
            acc3 = tl.dot(acc3, matrix, input_precision="ieee")
        norm = tl.full([ROWS], DIM**-0.5, tl.float32)
        target = out_ptr
        at = q_row
        if SPLITS == 1:
            norm /= weight
        else:
            at = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS + row
            tl.store(peak_ptr + at, peak, mask=valid)
            tl.store(weight_ptr + at, weight, mask=valid)
        target = out_ptr + at[:, None] * DIM + dim[None, :]
        dtype = out_ptr.dtype.element_ty
        norm = norm[:, None]
        mask = valid[:, None]
        tl.store(target, ((acc0 + acc1 + acc2 + acc3) * norm).to(dtype), mask=mask)
        tl.store(target + QUARTER, ((acc0 - acc1 + acc2 - acc3) * norm).to(dtype), mask=mask)
        tl.store(target + 2 * QUARTER, ((acc0 + acc1 - acc2 - acc3) * norm).to(dtype), mask=mask)
        tl.store(target + 3 * QUARTER, ((acc0 - acc1 - acc2 + acc3) * norm).to(dtype), mask=mask)


def heuristic(*, tiles: int, kv_heads: int, rows: int, pages_per_seq: int) -> Config:
    """A configuration for `rows` query rows (tokens x heads per KV head) in each tile."""
    if rows > 16:
        return Config(splits=1, num_warps=8 if rows >= 128 else 4, num_stages=1)
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), pages_per_seq, 32))
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=4, num_stages=2)


def attend(
    q: Array,
    kv: KVarNKV,
    layer: int,
    fresh: Array | None,
    step: AttentionStep,
    *,
    tile_size: int,
    config: Config | None = None,
) -> Array:
    """Attention of rotated queries [tokens, q_heads, head_dim], rotated back.

    `fresh` holds the step's rotated keys and values [tokens, kv_heads, 2, head_dim]; None: they are
    in the slots' sinks and tails already.
    """
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    q_heads, tiles, page_table = q.shape[1], step.tiles, step.page_table
    num_tiles = tiles.first.shape[0]
    rows = tile_size * (q_heads // kv_heads)
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, rows=rows, pages_per_seq=page_table.shape[1]
    )
    splits, padded_rows = config.splits, max(16, triton.next_power_of_2(rows))
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = (num_tiles, kv_heads, splits, padded_rows)
    statistics = jax.ShapeDtypeStruct((math.prod(parts) if splits > 1 else 1,), jnp.float32)
    partial = jax.ShapeDtypeStruct((*parts, 4 * quarter), jnp.float32)
    out, peak, weight = triton_call(
        q, kv.raw if fresh is None else fresh, kv.key_words, kv.value_words, kv.scales, kv.raw,
        step.slots, step.positions, page_table, step.cached, *tiles[:4],
        kernel=_attend,
        name="paged_attention_kvarn",
        out_type=(out_type if splits == 1 else partial, statistics, statistics),
        grid=(num_tiles, kv_heads, splits),
        num_warps=config.num_warps,
        layer=layer, num_pages=num_pages, num_slots=kv.raw.shape[1],
        table_stride=page_table.shape[1], num_tokens=q.shape[0],
        scale=(4 * quarter) ** -0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, tile_size=tile_size,
        ROWS=padded_rows, QUARTER=quarter, GROUP=group, BITS=kv.value_bits,
        SPLITS=splits, STAGES=config.num_stages,
        FRESH=fresh is not None, FAST=q.dtype == jnp.bfloat16,
    )  # fmt: skip
    if splits == 1:
        return out
    return triton_call(
        out, peak, weight, tiles.first, tiles.length,
        kernel=merge_splits,
        name="paged_attention_merge",
        out_type=out_type,
        grid=(num_tiles, q_heads, tile_size),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads,
        ROWS=padded_rows, DIM=4 * quarter, SPLITS=splits,
    )  # fmt: skip
