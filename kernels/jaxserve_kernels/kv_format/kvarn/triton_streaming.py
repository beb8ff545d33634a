"""Attention of a decode step's tokens over a KVarN cache, from the projection's partial sums.

A program takes one token, KV head and part of the context, as in `triton_attention`, but computes
what it needs of the token itself: no kernel lies between, and what earlier steps have left is
copied while the product before runs. The part that holds the token's place sees its key first, and
writes it and the value into the sink or the tail.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs.triton_parts import group_halves, row_of
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_attention import (
    merge,
    part_types,
    store_part,
    units_of,
)
from jaxserve_kernels.kv_format.kvarn.triton_inputs import signs
from jaxserve_kernels.kv_format.kvarn.triton_page import packed_keys, raw_keys
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.triton_call import triton_call

MAX_TOKENS = 8
"""Of more, each program computing them costs more than it saves."""

_TARGET_PROGRAMS = 1056
"""Eight for each of an H100's multiprocessors. Registers leave room for four at once, but few
contexts need all their programs, and fewer take longer: docs/performance/kv_formats.md."""

_CHUNK = 32
"""Keys in full precision that are visited together."""

_KEYS = 32
"""Keys of codes that are visited together, in each half of a page."""


@triton.jit
def _rotated(low, high, matrix):
    """Halves of heads [heads, half] as quarters [quarter, heads] of the heads times Sylvester's
    matrix, of which `matrix` is a quarter."""
    HEADS: tl.constexpr = low.shape[0]
    QUARTER: tl.constexpr = low.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(low, [HEADS, 2, QUARTER]), (2, 0, 1)))
    c, d = tl.split(tl.permute(tl.reshape(high, [HEADS, 2, QUARTER]), (2, 0, 1)))
    a = tl.dot(matrix, a, input_precision="ieee")
    b = tl.dot(matrix, b, input_precision="ieee")
    c = tl.dot(matrix, c, input_precision="ieee")
    d = tl.dot(matrix, d, input_precision="ieee")
    norm: tl.constexpr = (4 * QUARTER) ** -0.5
    even, odd = a + b, a - b
    late_even, late_odd = c + d, c - d
    q0 = ((even + late_even) * norm).to(low.dtype)
    q1 = ((odd + late_odd) * norm).to(low.dtype)
    q2 = ((even - late_even) * norm).to(low.dtype)
    q3 = ((odd - late_odd) * norm).to(low.dtype)
    return q0, q1, q2, q3


@triton.jit
def _column(x, number):
    """One column of x, float32 [..., 1]."""
    column = tl.arange(0, x.shape[1])[None, :]
    return tl.sum(tl.where(column == number, x.to(tl.float32), 0.0), axis=1)[:, None]


@triton.jit
def _begin(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head, matrix, own_ptr, owner,
    stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    eps: tl.constexpr, scale: tl.constexpr, dtype: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The rotated queries, and what a softmax knows that has seen nothing, or in the program that
    owns the token its own key, which goes to `own_ptr`."""
    group: tl.constexpr = q_heads // kv_heads
    low, high = group_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
        stride, parts, q_heads, kv_heads, eps, dtype, ROWS, 2 * QUARTER, EARLY,
    )  # fmt: skip
    q0, q1, q2, q3 = _rotated(low, high, matrix)
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([QUARTER, ROWS], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    if owner:
        column = tl.arange(0, ROWS)[None, :]
        target = own_ptr + tl.arange(0, QUARTER)[:, None]
        target += tl.where(column == group, 0, GROUP * 4 * QUARTER)
        fresh = (column == group) | (column == group + 1)
        tl.store(target, q0, mask=fresh)
        tl.store(target + QUARTER, q1, mask=fresh)
        tl.store(target + 2 * QUARTER, q2, mask=fresh)
        tl.store(target + 3 * QUARTER, q3, mask=fresh)
        # The same as between what is rotated.
        key_low = row_of(low, group)
        key_high = row_of(high, group)
        scores = tl.sum(low.to(tl.float32) * key_low + high.to(tl.float32) * key_high, axis=1)
        peak = scores * scale
        weight += 1.0
        acc0 += _column(q0, group + 1)
        acc1 += _column(q1, group + 1)
        acc2 += _column(q2, group + 1)
        acc3 += _column(q3, group + 1)
    return q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3


@triton.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    sums_ptr, peak_ptr, weight_ptr,
    first_page, first_slot, table_stride,
    stride: tl.constexpr, parts: tl.constexpr, eps: tl.constexpr, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program per tile, KV head and part."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group: tl.constexpr = q_heads // kv_heads
    DIM: tl.constexpr = 4 * QUARTER
    PER_PAGE: tl.constexpr = GROUP // (2 * KEYS)
    dtype: tl.constexpr = raw_ptr.dtype.element_ty
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    slot = tl.load(slot_ptr + tile).to(tl.int64)
    token = tl.load(first_ptr + tile).to(tl.int64)
    sink_units, raw_units, units = units_of(position, GROUP, CHUNK, PER_PAGE)
    per_split = tl.cdiv(units, splits)
    begin = split * per_split
    stop = tl.minimum(begin + per_split, units)
    if EARLY:
        gdc_launch_dependents()
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
    elif begin < stop:
        table = table_ptr + slot * table_stride
        dim = tl.arange(0, QUARTER)
        matrix = signs(QUARTER, dtype)
        first_tile = (first_slot + slot) * 2
        own_tile = first_tile + tl.where(position < GROUP, 0, 1)
        own_ptr = raw_ptr + ((own_tile * kv_heads + kv_head) * 2 * GROUP + position % GROUP) * DIM
        owner = (begin < raw_units) & (raw_units <= stop)
        first_packed = tl.maximum(begin, raw_units)
        q0 = tl.zeros([QUARTER, ROWS], dtype)
        q1 = q0
        q2 = q0
        q3 = q0
        peak = tl.zeros([ROWS], tl.float32)
        weight = peak
        acc0 = tl.zeros([QUARTER, ROWS], tl.float32)
        acc1 = acc0
        acc2 = acc0
        acc3 = acc0
        # In a loop's first pass, copies of what later ones read are under way: the ring is filled
        # before the loop.
        for index in tl.range(first_packed, stop, num_stages=STAGES):
            if index == first_packed:
                q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3 = _begin(
                    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head, matrix,
                    own_ptr, owner, stride, parts, q_heads, kv_heads, eps, scale, dtype,
                    ROWS, QUARTER, GROUP, EARLY,
                )  # fmt: skip
            unit = index - raw_units
            page = first_page + tl.load(table + unit // PER_PAGE + 1).to(tl.int64)
            peak, weight, acc0, acc1, acc2, acc3 = packed_keys(
                page, unit % PER_PAGE * KEYS, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                key_words_ptr, value_words_ptr, scales_ptr, kv_head,
                scale, kv_heads, GROUP, QUARTER, BITS, FAST, KEYS,
            )  # fmt: skip
        for index in tl.range(begin, tl.minimum(stop, raw_units), num_stages=STAGES):
            if (index == begin) & (stop <= first_packed):
                q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3 = _begin(
                    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head, matrix,
                    own_ptr, owner, stride, parts, q_heads, kv_heads, eps, scale, dtype,
                    ROWS, QUARTER, GROUP, EARLY,
                )  # fmt: skip
            in_own = index >= sink_units
            offset = (index - tl.where(in_own, sink_units, 0)) * CHUNK + tl.arange(0, CHUNK)
            held = (offset < position % GROUP) | (in_own == 0)
            kept = tl.where(in_own, own_tile, first_tile)
            kept = raw_ptr + ((kept * kv_heads + kv_head) * 2 * GROUP + offset) * DIM
            keys = kept[:, None] + dim[None, :]
            values = kept[None, :] + GROUP * DIM + dim[:, None]
            peak, weight, acc0, acc1, acc2, acc3 = raw_keys(
                held, keys, values, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                scale, QUARTER,
            )  # fmt: skip
        part = ((tile * kv_heads + kv_head) * splits + split).to(tl.int64)
        store_part(
            sums_ptr, peak_ptr, weight_ptr, part, peak, weight, acc0, acc1, acc2, acc3, group
        )


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int) -> Config:
    """A configuration for so many single tokens."""
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), 2 * pages_per_seq + 4, 64))
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=2, num_stages=2)


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
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=step.page_table.shape[1]
    )
    rows = max(8, triton.next_power_of_2(q_heads // kv_heads + 2))
    grid = (num_tiles, kv_heads, config.splits)
    chunk, keys = min(_CHUNK, group), min(_KEYS, group // 2)
    raw = jax.new_ref(kv.raw)
    sums, peak, weight = triton_call(
        qkv, *norms, *tables, kv.key_words, kv.value_words, kv.scales, raw,
        step.page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_kvarn_inputs",
        out_type=part_types((*grid, rows), head_dim),
        grid=grid,
        num_warps=config.num_warps, STAGES=config.num_stages,
        first_page=layer * num_pages, first_slot=layer * kv.raw.shape[1],
        table_stride=step.page_table.shape[1], stride=tokens * width, parts=parts, eps=eps,
        scale=head_dim**-0.5 * LOG2_E, q_heads=q_heads, kv_heads=kv_heads,
        ROWS=rows, QUARTER=quarter, GROUP=group, BITS=kv.value_bits, CHUNK=chunk,
        KEYS=keys, FAST=dtype == jnp.bfloat16,
    )  # fmt: skip
    out = merge(
        (sums, peak, weight), tiles, jax.ShapeDtypeStruct((tokens, q_heads, head_dim), dtype),
        kv_heads=kv_heads, group=group, chunk=chunk, per_page=group // (2 * keys),
    )  # fmt: skip
    return out, kv._replace(raw=jax.freeze(raw))
