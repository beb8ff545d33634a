"""Attention of single tokens over a KVarN cache: codes go into the products, scales to their other
factor.

Of a packed tile, with q and p the rows' queries and probabilities::

    score[g]  = column[g] * (sum_d (q[d] * scale[d]) * code[g, d] + sum_d q[d] * zero[d])
    out[d]   += column[d] * (sum_g (p[g] * scale[g]) * code[g, d] + sum_g p[g] * zero[g])

A code enters as the bfloat16 number 128 + code, which takes one instruction to make; what that
adds is taken off again with the factors as they were rounded. Zeros are moved to the middle of the
codes' range, so that rounding the factors costs little.

A head is four quarters, because that is how its codes lie in words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_inputs import signs
from jaxserve_kernels.kv_format.triton_parts import LOG2_E, rows, split_attention
from jaxserve_kernels.paged_attention import QueryTiles
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
    page, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    key_words_ptr, value_words_ptr, scales_ptr, kv_head,
    scale: tl.constexpr, kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    BITS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of codes."""
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
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        probs = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
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
def _raw_page(
    page, last, slot, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
    raw_ptr, first_slot, kv_head,
    scale: tl.constexpr, kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """The keys of one page in full precision, those up to position `last`."""
    DIM: tl.constexpr = 4 * QUARTER
    KEYS: tl.constexpr = GROUP // 2
    dim = tl.arange(0, QUARTER)[None, :]
    tile = (first_slot + slot).to(tl.int64) * 2 + tl.where(page > 0, 1, 0)
    for half in tl.static_range(2):
        offset = half * KEYS + tl.arange(0, KEYS)
        seen = page * GROUP + offset <= last
        held = seen[:, None]
        kept = raw_ptr + ((tile * kv_heads + kv_head) * 2 * GROUP + offset)[:, None] * DIM + dim
        k0 = tl.load(kept, mask=held, other=0.0)
        k1 = tl.load(kept + QUARTER, mask=held, other=0.0)
        k2 = tl.load(kept + 2 * QUARTER, mask=held, other=0.0)
        k3 = tl.load(kept + 3 * QUARTER, mask=held, other=0.0)
        scores = _dot4(q0, q1, q2, q3, k0, k1, k2, k3) * scale
        scores = tl.where(seen[None, :], scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        probs = tl.where(seen[None, :], tl.exp2(scores - new_peak[:, None]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        peak = new_peak
        weight = weight * shrink + tl.sum(probs, axis=1)
        probs = probs.to(q0.dtype)
        kept += GROUP * DIM
        v0 = tl.load(kept, mask=held, other=0.0)
        v1 = tl.load(kept + QUARTER, mask=held, other=0.0)
        v2 = tl.load(kept + 2 * QUARTER, mask=held, other=0.0)
        v3 = tl.load(kept + 3 * QUARTER, mask=held, other=0.0)
        shrink = shrink[:, None]
        acc0 = tl.dot(probs, v0, acc0 * shrink, input_precision="ieee")
        acc1 = tl.dot(probs, v1, acc1 * shrink, input_precision="ieee")
        acc2 = tl.dot(probs, v2, acc2 * shrink, input_precision="ieee")
        acc3 = tl.dot(probs, v3, acc3 * shrink, input_precision="ieee")
    return peak, weight, acc0, acc1, acc2, acc3


@triton.jit
def _attend(
    q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    out_ptr, peak_ptr, weight_ptr,
    layer, num_pages, num_slots, table_stride,
    scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    DIM: tl.constexpr = 4 * QUARTER
    if tl.load(length_ptr + tile) > 0:
        position = tl.load(position_ptr + tile)
        first = tl.load(first_ptr + tile)
        slot = tl.load(slot_ptr + tile)
        table = table_ptr + slot.to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, QUARTER)
        valid = row < group
        q_row = first.to(tl.int64) * q_heads + kv_head * group + row
        q_at = q_ptr + q_row[:, None] * DIM + dim[None, :]
        q0 = tl.load(q_at, mask=valid[:, None], other=0.0)
        q1 = tl.load(q_at + QUARTER, mask=valid[:, None], other=0.0)
        q2 = tl.load(q_at + 2 * QUARTER, mask=valid[:, None], other=0.0)
        q3 = tl.load(q_at + 3 * QUARTER, mask=valid[:, None], other=0.0)
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc1 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc2 = tl.zeros([ROWS, QUARTER], tl.float32)
        acc3 = tl.zeros([ROWS, QUARTER], tl.float32)

        own = position // GROUP  # the token's page
        per_split = tl.cdiv(own + 1, SPLITS)
        begin = split * per_split
        stop = tl.minimum(begin + per_split, own + 1)
        page_base = (layer * num_pages).to(tl.int64)
        packed_from = tl.maximum(begin, 1)
        for index in tl.range(packed_from, tl.minimum(stop, own), num_stages=STAGES):
            page = page_base + tl.load(table + index)
            peak, weight, acc0, acc1, acc2, acc3 = _packed_page(
                page, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                key_words_ptr, value_words_ptr, scales_ptr, kv_head,
                scale, kv_heads, GROUP, QUARTER, BITS, FAST,
            )  # fmt: skip
        # In full precision: page 0 if it is this split's, and the token's.
        sink = (begin == 0) & (own > 0)
        raw_stop = tl.where((begin <= own) & (stop > own), 2, 1)  # a split may be empty
        for number in range(tl.where(sink, 0, 1), raw_stop):
            peak, weight, acc0, acc1, acc2, acc3 = _raw_page(
                number * own, position, slot,
                q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                raw_ptr, layer * num_slots, kv_head, scale, kv_heads, GROUP, QUARTER,
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


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int) -> Config:
    """A configuration for so many single tokens."""
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), pages_per_seq, 32))
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=4, num_stages=2)


def attend(
    q: Array,
    kv: KVarNKV,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    out: jax.Ref | None = None,
    config: Config | None = None,
) -> Array | None:
    """Attention of single tokens, rotated q [tokens, q_heads, head_dim], rotated back.

    Their own keys and values are in the slots' sinks and tails. Returned, or stored in `out`.
    """
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    num_tiles = tiles.first.shape[0]
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=page_table.shape[1]
    )

    def launch(given: tuple[jax.Ref, ...], types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
        return triton_call(
            q, kv.key_words, kv.value_words, kv.scales, kv.raw, page_table, *tiles[:4],
            *given,
            kernel=_attend,
            name="paged_attention_kvarn",
            out_type=types,
            grid=(num_tiles, kv_heads, config.splits),
            num_warps=config.num_warps,
            layer=layer, num_pages=num_pages, num_slots=kv.raw.shape[1],
            table_stride=page_table.shape[1],
            scale=(4 * quarter) ** -0.5 * LOG2_E,
            q_heads=q.shape[1], kv_heads=kv_heads,
            ROWS=rows(q, kv_heads), QUARTER=quarter, GROUP=group, BITS=kv.value_bits,
            SPLITS=config.splits, STAGES=config.num_stages, FAST=q.dtype == jnp.bfloat16,
        )  # fmt: skip

    return split_attention(launch, q, tiles, kv_heads, config.splits, out)
