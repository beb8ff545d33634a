"""Paged attention as a flash kernel: one program per query tile, KV head and split of the context.

The tile's tokens and the query heads that share a KV head form the rows of one matrix, so keys
and values are read once for all of them. With few tiles (decode), several programs share a context
and a second kernel merges their results by their softmax weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.paged_attention.config import Config, choose
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.triton_call import triton_call

_LOG2_E = 1.4426950408889634


@triton.jit
def _visit(
    block, q, peak, weight, acc, kv_ptr, table, width, first_page, kv_head, row_position,
    scale: tl.constexpr, kv_heads: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One block of KEYS keys: the streamed softmax of the rows moves on."""
    key_position = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    if PAGE >= KEYS:
        page = first_page + tl.load(table + block * KEYS // PAGE).to(tl.int64)
    else:  # the last block may reach past the table
        inside = key_position // PAGE < width
        entry = tl.load(table + key_position // PAGE, mask=inside, other=0)
        page = first_page + entry.to(tl.int64)
    kv_row = (page * kv_heads + kv_head) * (2 * PAGE) + key_position % PAGE
    k = tl.load(kv_ptr + kv_row[:, None] * DIM + dim[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASK:
        scores = tl.where(key_position[None, :] <= row_position[:, None], scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=1)
    values = kv_ptr + (kv_row + PAGE)[:, None] * DIM + dim[None, :]
    if MASK:  # what an earlier owner left past the end may be anything, even NaN
        last = tl.max(row_position, axis=0)
        v = tl.load(values, mask=key_position[:, None] <= last, other=0.0)
    else:
        v = tl.load(values)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_peak, weight, acc


@triton.jit
def _attend(
    q_ptr, kv_ptr, first_page, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    out_ptr, peak_ptr, weight_ptr,
    table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    if length > 0:
        position = tl.load(position_ptr + tile)
        first = tl.load(first_ptr + tile).to(tl.int64)
        table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM)
        token = row // group
        valid = token < tl.minimum(length, tile_size)
        q_row = (first + token) * q_heads + kv_head * group + row % group
        q = tl.load(q_ptr + q_row[:, None] * DIM + dim[None, :], mask=valid[:, None], other=0.0)
        row_position = position + tl.minimum(token, length - 1)

        blocks = tl.cdiv(position + length, KEYS)
        per_split = tl.cdiv(blocks, SPLITS)
        begin = split * per_split
        end = tl.minimum(begin + per_split, blocks)
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        masked_from = begin
        if ROWS > 16:  # long tiles: only the last blocks hold keys that a row must not see
            masked_from = tl.maximum(tl.minimum((position + 1) // KEYS, end), begin)
            for block in tl.range(begin, masked_from, num_stages=STAGES):
                peak, weight, acc = _visit(
                    block, q, peak, weight, acc, kv_ptr, table, table_stride, first_page, kv_head,
                    row_position,
                    scale, kv_heads, DIM, PAGE, KEYS, False,
                )  # fmt: skip
        for block in tl.range(masked_from, end, num_stages=STAGES):
            peak, weight, acc = _visit(
                block, q, peak, weight, acc, kv_ptr, table, table_stride, first_page, kv_head,
                row_position,
                scale, kv_heads, DIM, PAGE, KEYS, True,
            )  # fmt: skip

        if SPLITS == 1:
            out = acc / weight[:, None]
            target = out_ptr + q_row[:, None] * DIM + dim[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])
        else:
            part = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS + row
            tl.store(out_ptr + part[:, None] * DIM + dim[None, :], acc, mask=valid[:, None])
            tl.store(peak_ptr + part, peak, mask=valid)
            tl.store(weight_ptr + part, weight, mask=valid)


@triton.jit
def _merge(
    acc_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_head = tl.program_id(1)
    token = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    if token < tl.load(length_ptr + tile):
        row = token * group + q_head % group
        split = tl.arange(0, SPLITS)
        dim = tl.arange(0, DIM)
        part = ((tile * kv_heads + q_head // group) * SPLITS + split).to(tl.int64) * ROWS + row
        peaks = tl.load(peak_ptr + part)
        shrink = tl.exp2(peaks - tl.max(peaks, axis=0))
        weight = tl.sum(tl.load(weight_ptr + part) * shrink, axis=0)
        acc = tl.load(acc_ptr + part[:, None] * DIM + dim[None, :])
        out = tl.sum(acc * shrink[:, None], axis=0) / weight
        q_row = (tl.load(first_ptr + tile).to(tl.int64) + token) * q_heads + q_head
        tl.store(out_ptr + q_row * DIM + dim, out.to(out_ptr.dtype.element_ty))


def paged_attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    config: Config | None = None,
) -> Array:
    num_pages, kv_heads, _, page_size, head_dim = kv.shape[1:]
    q_heads = q.shape[1]
    num_tiles = tiles.first.shape[0]
    rows = tile_size * (q_heads // kv_heads)
    config = config or choose(
        tiles=num_tiles, kv_heads=kv_heads, rows=rows, pages_per_seq=page_table.shape[1]
    )
    padded_rows = max(16, triton.next_power_of_2(rows))
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if config.splits == 1:
        partial = (out_type, *_statistics(1))
    else:
        parts = (num_tiles, kv_heads, config.splits, padded_rows)
        partial = (
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            *_statistics(num_tiles * kv_heads * config.splits * padded_rows),
        )
    out, peak, weight = triton_call(
        q, kv, layer * num_pages, page_table, *tiles,
        kernel=_attend,
        name="paged_attention",
        out_type=partial,
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=config.num_warps,
        table_stride=page_table.shape[1],
        scale=head_dim**-0.5 * _LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, tile_size=tile_size,
        ROWS=padded_rows, DIM=head_dim, PAGE=page_size, KEYS=max(page_size, 64),
        SPLITS=config.splits, STAGES=config.num_stages,
    )  # fmt: skip
    if config.splits == 1:
        return out
    return triton_call(
        out, peak, weight, tiles.first, tiles.length,
        kernel=_merge,
        name="paged_attention_merge",
        out_type=out_type,
        grid=(num_tiles, q_heads, tile_size),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads,
        ROWS=padded_rows, DIM=head_dim, SPLITS=config.splits,
    )  # fmt: skip


def _statistics(size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Peak and weight of each row's softmax."""
    each = jax.ShapeDtypeStruct((size,), jnp.float32)
    return each, each
