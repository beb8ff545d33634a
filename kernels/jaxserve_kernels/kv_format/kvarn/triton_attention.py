"""Attention of single tokens over a KVarN cache.

A program is one warp. Its time is memory latency, which more threads would not shorten, and a
single warp needs no barriers. A context is cut into units of about the same number of bytes: a page
of codes, or `_CHUNK` keys in full precision. Several programs share the units of a context.
`_merge` adds their results and rotates the sum back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.kv_format.base import limits_of
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_inputs import signs
from jaxserve_kernels.kv_format.kvarn.triton_page import packed_keys, raw_keys
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_MOST_PARTS = 16
"""The most parts into which a decode row's context is split in a mixed step."""

_CHUNK = 32
"""Keys in full precision per unit: as many bytes as a page of codes."""


def _programs(target: Target) -> int:
    return limits_of(target).kvarn_programs * target.gpu.multiprocessors


@triton.jit
def units_of(position, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Divides a context into units of three kinds: chunks of the sink (unless that is the token's
    own page), then chunks of the own page, then the pages between. Returns the end of each kind."""
    own = position // GROUP
    sink = tl.minimum(own, 1) * (GROUP // CHUNK)
    raw = sink + position % GROUP // CHUNK + 1
    return sink, raw, raw + tl.maximum(own - 1, 0)


@triton.jit
def store_part(
    sums_ptr, peak_ptr, weight_ptr, part, peak, weight, acc0, acc1, acc2, acc3, group: tl.constexpr
):  # fmt: skip
    """Stores a program's sums, peaks and weights, for the merge."""
    QUARTER: tl.constexpr = acc0.shape[0]
    ROWS: tl.constexpr = acc0.shape[1]
    row = tl.arange(0, ROWS)
    valid = row < group
    at = part * ROWS + row
    target = sums_ptr + at[None, :] * (4 * QUARTER) + tl.arange(0, QUARTER)[:, None]
    there = valid[None, :]
    tl.store(target, acc0, mask=there)
    tl.store(target + QUARTER, acc1, mask=there)
    tl.store(target + 2 * QUARTER, acc2, mask=there)
    tl.store(target + 3 * QUARTER, acc3, mask=there)
    tl.store(peak_ptr + at, peak, mask=valid)
    tl.store(weight_ptr + at, weight, mask=valid)


@triton.jit
def _attend_part(
    q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr, table_ptr, first_ptr,
    sums_ptr, peak_ptr, weight_ptr, tile, kv_head, split, splits, position, slot,
    first_page, first_slot, table_stride,
    scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Attention of one token over one part of its context. A tile is one token."""
    group: tl.constexpr = q_heads // kv_heads
    DIM: tl.constexpr = 4 * QUARTER
    sink_units, raw_units, units = units_of(position, GROUP, CHUNK)
    per_split = tl.cdiv(units, splits)
    begin = split * per_split
    stop = tl.minimum(begin + per_split, units)
    if begin < stop:
        row = tl.arange(0, ROWS)
        valid = row < group
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        table = table_ptr + slot.to(tl.int64) * table_stride
        dim = tl.arange(0, QUARTER)
        q_row = tl.load(first_ptr + tile).to(tl.int64) * q_heads + kv_head * group + row
        q_at = q_ptr + q_row[None, :] * DIM + dim[:, None]
        there = valid[None, :]
        q0 = tl.load(q_at, mask=there, other=0.0)
        q1 = tl.load(q_at + QUARTER, mask=there, other=0.0)
        q2 = tl.load(q_at + 2 * QUARTER, mask=there, other=0.0)
        q3 = tl.load(q_at + 3 * QUARTER, mask=there, other=0.0)
        acc0 = tl.zeros([QUARTER, ROWS], tl.float32)
        acc1 = tl.zeros([QUARTER, ROWS], tl.float32)
        acc2 = tl.zeros([QUARTER, ROWS], tl.float32)
        acc3 = tl.zeros([QUARTER, ROWS], tl.float32)
        for index in tl.range(tl.maximum(begin, raw_units), stop, num_stages=STAGES):
            page = first_page + tl.load(table + index - raw_units + 1).to(tl.int64)
            peak, weight, acc0, acc1, acc2, acc3 = packed_keys(
                page, q0, q1, q2, q3, peak, weight, acc0, acc1, acc2, acc3,
                key_words_ptr, value_words_ptr, scales_ptr, kv_head,
                scale, kv_heads, GROUP, QUARTER, BITS, FAST,
            )  # fmt: skip
        first_tile = (first_slot + slot).to(tl.int64) * 2
        for index in tl.range(begin, tl.minimum(stop, raw_units), num_stages=STAGES):
            in_own = index >= sink_units
            offset = (index - tl.where(in_own, sink_units, 0)) * CHUNK + tl.arange(0, CHUNK)
            held = (offset <= position % GROUP) | (in_own == 0)
            kept = first_tile + tl.where(in_own & (position >= GROUP), 1, 0)
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


@triton.jit
def _attend(
    q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    sums_ptr, peak_ptr, weight_ptr,
    first_page, first_slot, table_stride,
    scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program per tile, KV head and part."""
    tile = tl.program_id(0)
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    slot = tl.load(slot_ptr + tile)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length > 0:
        _attend_part(
            q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr, table_ptr, first_ptr,
            sums_ptr, peak_ptr, weight_ptr,
            tile, tl.program_id(1), tl.program_id(2), tl.num_programs(2), position, slot,
            first_page, first_slot, table_stride,
            scale, q_heads, kv_heads, ROWS, QUARTER, GROUP, BITS, CHUNK, STAGES, FAST,
        )  # fmt: skip


@triton.jit
def _splits_of(count, kv_heads: tl.constexpr, PROGRAMS: tl.constexpr, MOST: tl.constexpr):
    """The number of parts per context that gives work to all programs."""
    return tl.minimum(tl.maximum(PROGRAMS // (tl.maximum(count, 1) * kv_heads), 1), MOST)


@triton.jit
def _attend_decode_rows(
    q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, count_ptr, slot_ptr, position_ptr,
    sums_ptr, peak_ptr, weight_ptr,
    first_page, first_slot, table_stride,
    scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
    PROGRAMS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Programs take parts in turn. The number of tiles is data."""
    count = tl.load(count_ptr)
    splits = _splits_of(count, kv_heads, PROGRAMS, MOST)
    for unit in range(tl.program_id(0), count * kv_heads * splits, PROGRAMS):
        tile = unit // (kv_heads * splits)
        _attend_part(
            q_ptr, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr, table_ptr, first_ptr,
            sums_ptr, peak_ptr, weight_ptr,
            tile, unit // splits % kv_heads, unit % splits, splits,
            tl.load(position_ptr + tile), tl.load(slot_ptr + tile),
            first_page, first_slot, table_stride,
            scale, q_heads, kv_heads, ROWS, QUARTER, GROUP, BITS, CHUNK, STAGES, FAST,
        )  # fmt: skip


@triton.jit
def _merge_part(
    sums_ptr, peak_ptr, weight_ptr, first_ptr, out_ptr, tile, q_head, splits, units,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the parts of a context by their softmax weights, and rotates the sum back. The Hadamard
    matrix is the Kronecker product of one for an index's high bits and one for its low bits."""
    group: tl.constexpr = q_heads // kv_heads
    LOW: tl.constexpr = 8
    HIGH: tl.constexpr = DIM // LOW
    split = tl.arange(0, WIDTH)
    dim = tl.arange(0, DIM)
    there = split * tl.cdiv(units, splits) < units
    part = ((tile * kv_heads + q_head // group) * splits + split).to(tl.int64) * ROWS
    part += q_head % group
    peaks = tl.load(peak_ptr + part, mask=there, other=-1.0e30)
    weights = tl.load(weight_ptr + part, mask=there, other=0.0)
    acc = tl.load(sums_ptr + part[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)
    shares = tl.exp2(peaks - tl.max(peaks, axis=0))
    norm = (DIM**-0.5) / tl.sum(weights * shares, axis=0)
    x = tl.reshape(tl.sum(acc * (shares * norm)[:, None], axis=0), [HIGH, LOW])
    x = tl.sum(x[:, :, None] * signs(LOW, tl.float32)[None, :, :], axis=1)
    x = tl.sum(x[:, None, :] * signs(HIGH, tl.float32)[:, :, None], axis=0)
    q_row = tl.load(first_ptr + tile).to(tl.int64) * q_heads + q_head
    target = out_ptr + q_row * DIM + dim
    tl.store(target, tl.reshape(x, [DIM]).to(out_ptr.dtype.element_ty))


@triton.jit
def _merge(
    sums_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, position_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program per tile and query head."""
    tile = tl.program_id(0)
    length = tl.load(length_ptr + tile)
    _, _, units = units_of(tl.load(position_ptr + tile), GROUP, CHUNK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length > 0:
        _merge_part(
            sums_ptr, peak_ptr, weight_ptr, first_ptr, out_ptr, tile, tl.program_id(1), SPLITS,
            units, q_heads, kv_heads, ROWS, DIM, WIDTH,
        )  # fmt: skip


@triton.jit
def _merge_decode_rows(
    sums_ptr, peak_ptr, weight_ptr, first_ptr, count_ptr, position_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """`_merge` for `_attend_decode_rows`. Programs take query heads in turn."""
    count = tl.load(count_ptr)
    splits = _splits_of(count, kv_heads, PROGRAMS, MOST)
    for unit in range(tl.program_id(0), count * q_heads, PROGRAMS):
        tile = unit // q_heads
        _, _, units = units_of(tl.load(position_ptr + tile), GROUP, CHUNK)
        _merge_part(
            sums_ptr, peak_ptr, weight_ptr, first_ptr, out_ptr,
            tile, unit % q_heads, splits, units, q_heads, kv_heads, ROWS, DIM, MOST,
        )  # fmt: skip


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int, target: Target) -> Config:
    """A configuration for `tiles` single tokens."""
    wanted = max(1, min(_programs(target) // (tiles * kv_heads), pages_per_seq + 4, 32))
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=1, num_stages=2)


def attend(
    q: Array, kv: KVarNKV, layer: int, page_table: Array, tiles: QueryTiles, *, target: Target
) -> Array:
    """Attention of single tokens. q [tokens, q_heads, head_dim] is rotated, the result is not.

    The tokens' own keys and values must be in the slots' sinks and tails.
    """
    num_tiles, kv_heads = tiles.first.shape[0], kv.key_words.shape[2]
    config = heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=page_table.shape[1], target=target
    )
    arrays, types, numbers = _arguments(q, kv, layer, (num_tiles, kv_heads, config.splits))
    parts = triton_call(
        *arrays, page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_kvarn",
        target=target,
        out_type=types,
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=config.num_warps, STAGES=config.num_stages,
        table_stride=page_table.shape[1], **numbers,
    )  # fmt: skip
    return triton_call(
        *parts, tiles.first, tiles.length, tiles.position,
        kernel=_merge,
        name="paged_attention_kvarn_merge",
        target=target,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tiles, q.shape[1]),
        num_warps=4,
        q_heads=q.shape[1], kv_heads=kv_heads, ROWS=numbers["ROWS"], DIM=q.shape[2],
        GROUP=numbers["GROUP"], CHUNK=numbers["CHUNK"], SPLITS=config.splits,
        WIDTH=triton.next_power_of_2(config.splits),
    )  # fmt: skip


def attend_decode_rows(
    q: Array,
    kv: KVarNKV,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    out: jax.Ref,
    *,
    target: Target,
) -> None:
    """Attention of the decode rows of a mixed step. The result is stored in `out`.

    The list of tiles has room for all slots, and is mostly padding in most steps. So the grid does
    not depend on it: starting a program per entry would take as long as the real work.
    """
    num_tiles, q_heads, head_dim = tiles.first.shape[0], *q.shape[1:]
    kv_heads = kv.key_words.shape[2]
    count = jnp.sum(tiles.length > 0, dtype=jnp.int32).reshape(1)
    parts = max(num_tiles, _programs(target) // kv_heads)
    arrays, types, numbers = _arguments(q, kv, layer, (parts, kv_heads))
    written = triton_call(
        *arrays, page_table, tiles.first, count, tiles.slot, tiles.position,
        kernel=_attend_decode_rows,
        name="paged_attention_kvarn_decode_rows",
        target=target,
        out_type=types,
        grid=(_programs(target),),
        num_warps=1, STAGES=2,
        table_stride=page_table.shape[1], PROGRAMS=_programs(target), MOST=_MOST_PARTS, **numbers,
    )  # fmt: skip
    triton_call(
        *written, tiles.first, count, tiles.position, out,
        kernel=_merge_decode_rows,
        name="paged_attention_kvarn_decode_rows_merge",
        target=target,
        out_type=(),
        grid=(_programs(target),),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=numbers["ROWS"], DIM=head_dim,
        GROUP=numbers["GROUP"], CHUNK=numbers["CHUNK"],
        PROGRAMS=_programs(target), MOST=_MOST_PARTS,
    )  # fmt: skip


def part_types(shape: tuple[int, ...], head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the arrays between attention and merge: sums, peaks and weights."""
    statistics = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32), statistics, statistics


def _arguments(
    q: Array, kv: KVarNKV, layer: int, parts: tuple[int, ...]
) -> tuple[tuple[Array, ...], tuple[jax.ShapeDtypeStruct, ...], dict[str, Any]]:
    """Arguments that both attention kernels share: arrays, types of the parts, and constants."""
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    rows = max(8, triton.next_power_of_2(q.shape[1] // kv_heads))  # products need 8 rows at least
    types = part_types((*parts, rows), q.shape[2])
    numbers = {
        "first_page": layer * num_pages, "first_slot": layer * kv.raw.shape[1],
        "scale": q.shape[2] ** -0.5 * LOG2_E, "q_heads": q.shape[1], "kv_heads": kv_heads,
        "ROWS": rows, "QUARTER": quarter, "GROUP": group, "BITS": kv.value_bits,
        "CHUNK": min(_CHUNK, group), "FAST": q.dtype == jnp.bfloat16,
    }  # fmt: skip
    return (q, kv.key_words, kv.value_words, kv.scales, kv.raw), types, numbers
