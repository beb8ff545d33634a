"""Attention of single tokens over keys and values of 8 bits.

Keys and values enter the products unscaled. The keys' scales multiply the scores; the values'
scales multiply the probabilities (int8) or the result (fp8). There is one program per token, KV
head and split of the context, as in `paged_attention`.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.kv_format.base import limits_of
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV
from jaxserve_kernels.kv_format.eight_bit.triton_numbers import halves, numbers
from jaxserve_kernels.paged_attention import QueryTiles, triton_decode_rows
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.paged_attention.triton import with_sinks
from jaxserve_kernels.paged_attention.triton_merge import first_block, merged, part_types
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

KEYS = 64
"""Keys per block."""


@triton.jit
def visit(
    block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr, table, width,
    first_page, kv_head, last, scale,
    kv_heads: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Visits one block of KEYS keys. Keys after position `last` are masked, and with a window those
    before the last WINDOW ones."""
    key_position = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, HALF)
    if PAGE >= KEYS:
        page = first_page + tl.load(table + block * KEYS // PAGE).to(tl.int64)
    else:  # the last block may extend past the page table
        inside = key_position // PAGE < width
        entry = tl.load(table + key_position // PAGE, mask=inside, other=0)
        page = first_page + entry.to(tl.int64)
    kv_row = (page * kv_heads + kv_head) * (2 * PAGE) + key_position % PAGE
    words = tl.load(words_ptr + kv_row[:, None] * HALF + dim[None, :])
    k_low, k_high = halves(words, FP8, FAST)
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
    if FP8:
        scores *= scale
    else:
        scores *= (tl.load(scales_ptr + kv_row) * scale)[None, :]
    scores = tl.where(key_position[None, :] <= last, scores, -1.0e30)
    if WINDOW:
        scores = tl.where(key_position[None, :] > last - WINDOW, scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=1)
    v_row = kv_row + PAGE
    values = words_ptr + v_row[:, None] * HALF + dim[None, :]
    # An earlier owner of the page may have left anything past the end, even NaN. The same holds for
    # pages before the window.
    there = key_position <= last
    if WINDOW:
        there = there & (key_position > last - WINDOW)
    if FP8:
        words = tl.load(values, mask=there[:, None], other=0)
    else:
        words = tl.load(values)
        probs *= tl.load(scales_ptr + v_row, mask=there, other=0.0)[None, :]
    v_low, v_high = halves(words, FP8, FAST)
    probs = probs.to(v_low.dtype)
    acc_low = tl.dot(probs, v_low, acc_low * shrink[:, None], input_precision="ieee")
    acc_high = tl.dot(probs, v_high, acc_high * shrink[:, None], input_precision="ieee")
    return new_peak, weight, acc_low, acc_high


@triton.jit
def _visit_blocks(
    q_ptr, q_row, valid, words_ptr, scales_ptr, layer, num_pages, table, width, kv_head,
    begin, end, last, sinks_ptr, head, is_first, scale: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of the queries in the rows `q_row` over the blocks begin..end of keys, up to
    position `last`."""
    dim = tl.arange(0, HALF)
    first_page = (layer * num_pages).to(tl.int64)
    q_at = q_ptr + q_row[:, None] * (2 * HALF) + dim[None, :]
    q_low = tl.load(q_at, mask=valid[:, None], other=0.0)
    q_high = tl.load(q_at + HALF, mask=valid[:, None], other=0.0)
    if FAST and FP8:
        q_low = q_low.to(tl.float16)
        q_high = q_high.to(tl.float16)
    elif not FAST:
        q_low = q_low.to(tl.float32)
        q_high = q_high.to(tl.float32)
    score_scale = scale * 1.0
    result_scale = 1.0
    if FP8:
        scales = scales_ptr + (layer * kv_heads + kv_head) * 2
        score_scale = tl.load(scales) * scale
        result_scale = tl.load(scales + 1)
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak, weight = with_sinks(peak, weight, sinks_ptr, head, valid & is_first)
    acc_low = tl.zeros([ROWS, HALF], tl.float32)
    acc_high = tl.zeros([ROWS, HALF], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        peak, weight, acc_low, acc_high = visit(
            block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr,
            table, width, first_page, kv_head, last, score_scale,
            kv_heads, HALF, PAGE, KEYS, FP8, FAST, WINDOW,
        )  # fmt: skip
    return peak, weight, acc_low * result_scale, acc_high * result_scale


@triton.jit
def _store_rows(out_ptr, row, valid, low, high):
    """Stores both halves of rows of `out_ptr` [rows, 2 * half]."""
    HALF: tl.constexpr = low.shape[1]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    at = out_ptr + row[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(at, low.to(dtype), mask=valid[:, None])
    tl.store(at + HALF, high.to(dtype), mask=valid[:, None])


@triton.jit
def _attend(
    q_ptr, words_ptr, scales_ptr, layer, table_ptr, first_ptr, length_ptr, slot_ptr,
    position_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr,
    num_pages, table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
    WINDOW: tl.constexpr = 0, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program per tile, KV head and split."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    first = tl.load(first_ptr + tile).to(tl.int64)
    table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
    before = first_block(position, KEYS, WINDOW)
    blocks = position // KEYS + 1 - before
    per_split = tl.cdiv(blocks, SPLITS)
    begin = before + split * per_split
    end = tl.minimum(begin + per_split, before + blocks)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if (length > 0) & (begin < end):
        row = tl.arange(0, ROWS)
        valid = row < group
        q_row = first * q_heads + kv_head * group + row
        peak, weight, acc_low, acc_high = _visit_blocks(
            q_ptr, q_row, valid, words_ptr, scales_ptr, layer, num_pages, table, table_stride,
            kv_head, begin, end, position, sinks_ptr, kv_head * group + row, split == 0,
            scale, kv_heads,
            ROWS, HALF, PAGE, KEYS, STAGES, FP8, FAST, WINDOW,
        )  # fmt: skip
        part = (tile * kv_heads + kv_head) * SPLITS + split
        _store(
            out_ptr, q_row, part_ptr, peak_ptr, weight_ptr, part, valid, per_split >= blocks,
            peak, weight, acc_low, acc_high,
        )  # fmt: skip


@triton.jit
def _store(
    out_ptr, q_row, part_ptr, peak_ptr, weight_ptr, part, valid, whole,
    peak, weight, acc_low, acc_high,
):  # fmt: skip
    """Stores the result of rows whose whole context was visited; otherwise stores part number
    `part`, which `merged` combines with the others."""
    ROWS: tl.constexpr = acc_low.shape[0]
    if whole:
        total = weight[:, None]
        _store_rows(out_ptr, q_row, valid, acc_low / total, acc_high / total)
    else:
        at = (part * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        _store_rows(part_ptr, at, valid, acc_low, acc_high)
        tl.store(peak_ptr + at, peak, mask=valid)
        tl.store(weight_ptr + at, weight, mask=valid)


@triton.jit
def _attend_decode_rows(
    q_ptr, words_ptr, scales_ptr, layer, table_ptr,
    first_ptr, slot_ptr, position_ptr, begin_ptr, end_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    num_pages, table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Attention of decode rows beside chunks, as in `paged_attention.triton_decode_rows`."""
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = q_heads // kv_heads
    begin = tl.load(begin_ptr + place)
    end = tl.load(end_ptr + place)
    first = tl.load(first_ptr + place).to(tl.int64)
    last = tl.load(position_ptr + place)
    table = table_ptr + tl.load(slot_ptr + place).to(tl.int64) * table_stride
    if begin < end:
        row = tl.arange(0, ROWS)
        valid = row < group
        q_row = first * q_heads + kv_head * group + row
        is_first = begin == first_block(last, KEYS, WINDOW)
        peak, weight, acc_low, acc_high = _visit_blocks(
            q_ptr, q_row, valid, words_ptr, scales_ptr, layer, num_pages, table, table_stride,
            kv_head, begin, end, last, sinks_ptr, kv_head * group + row, is_first,
            scale, kv_heads, ROWS, HALF, PAGE, KEYS, STAGES, FP8, FAST, WINDOW,
        )  # fmt: skip
        whole = is_first & (end > last // KEYS)
        _store(
            out_ptr, q_row, part_ptr, peak_ptr, weight_ptr, place * kv_heads + kv_head, valid,
            whole, peak, weight, acc_low, acc_high,
        )  # fmt: skip


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int, target: Target) -> Config:
    """A configuration for `tiles` single tokens."""
    target_programs = limits_of(target).eight_bit_programs * target.gpu.multiprocessors
    wanted = max(1, min(target_programs // (tiles * kv_heads), pages_per_seq, 32))
    warps = 2 if tiles * kv_heads > 2 * target_programs else 4
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=warps, num_stages=3)


def attend(
    q: Array,
    kv: EightBitKV,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    *,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> Array:
    """Attention of single tokens, q [tokens, q_heads, head_dim]."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    num_tiles, q_heads, head_dim = tiles.first.shape[0], *q.shape[1:]
    config = heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=page_table.shape[1], target=target
    )
    rows = _rows(q, kv)
    result, *parts = triton_call(
        q, kv.words, kv.scales, layer, page_table, *tiles[:4], sinks,
        kernel=_attend,
        name="paged_attention_8_bit",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            *part_types(num_tiles, kv_heads, config.splits, rows, head_dim),
        ),
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=config.num_warps,
        num_pages=num_pages, table_stride=page_table.shape[1],
        scale=head_dim**-0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads,
        ROWS=rows, HALF=half, PAGE=page_size, KEYS=KEYS,
        SPLITS=config.splits, STAGES=config.num_stages, WINDOW=window or 0,
        **numbers(q.dtype, kv, target=target),
    )  # fmt: skip
    return merged(
        result, parts, tiles, config, tile_size=1, keys=KEYS, window=window, target=target
    )


def attend_decode_rows(
    q: Array,
    kv: EightBitKV,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    out: jax.Ref,
    *,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> None:
    """Attention of the decode rows of a mixed step. The result is stored in `out`. If there are few
    rows, several programs share a context: see `paged_attention.triton_decode_rows`."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    q_heads, head_dim = q.shape[1:]
    rows = _rows(q, kv)
    splits, parts = triton_decode_rows.split_contexts(tiles, keys=KEYS, window=window)
    written = triton_call(
        q, kv.words, kv.scales, layer, page_table, *splits, sinks, out,
        kernel=_attend_decode_rows,
        name="paged_attention_8_bit_decode_rows",
        target=target,
        out_type=triton_decode_rows.part_types(kv_heads, rows, head_dim),
        grid=(splits.first.shape[0], kv_heads),
        num_warps=2,
        num_pages=num_pages, table_stride=page_table.shape[1],
        scale=head_dim**-0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads,
        ROWS=rows, HALF=half, PAGE=page_size, KEYS=KEYS, STAGES=3, WINDOW=window or 0,
        **numbers(q.dtype, kv, target=target),
    )  # fmt: skip
    triton_decode_rows.merge(written, parts, out, target=target)


def _rows(q: Array, kv: EightBitKV) -> int:
    """Query heads that share a KV head, padded to what the tensor cores need."""
    return max(16, triton.next_power_of_2(q.shape[1] // kv.words.shape[2]))
