"""Paged attention as a flash kernel: one program per query tile, KV head and split of the context.

The tile's tokens and the query heads that share a KV head form the rows of one matrix, so keys
and values are read once for all of them. With few tiles (decode), several programs share a context
and a second kernel merges their results by their softmax weights.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.paged_attention import hopper
from jaxserve_kernels.paged_attention.config import (
    LOG2_E,
    Config,
    HopperConfig,
)
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.paged_attention.triton_merge import first_block, merged, part_types
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def visit(
    block, q, peak, weight, acc, kv_ptr, table, width, first_page, kv_head, row_position,
    scale: tl.constexpr, kv_heads: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Adds one block of KEYS keys to the streamed softmax of the rows. A row that sees none of them
    gets arbitrary weights, which its first visible key scales to 0."""
    key_position = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    if PAGE >= KEYS:
        page = first_page + tl.load(table + block * KEYS // PAGE).to(tl.int64)
    else:  # the last block may extend past the page table
        inside = key_position // PAGE < width
        entry = tl.load(table + key_position // PAGE, mask=inside, other=0)
        page = first_page + entry.to(tl.int64)
    kv_row = (page * kv_heads + kv_head) * (2 * PAGE) + key_position % PAGE
    keys = kv_ptr + kv_row[:, None] * DIM + dim[None, :]
    if MASK:
        there = key_position[:, None] <= tl.max(row_position, axis=0)
        if WINDOW:
            there = there & (key_position[:, None] > tl.min(row_position, axis=0) - WINDOW)
    # Most of a block of several pages may be past the end: do not read those keys.
    PAST: tl.constexpr = MASK and (PAGE < KEYS or WINDOW > 0)
    k = tl.load(keys, mask=there, other=0.0) if PAST else tl.load(keys)
    k = k.to(q.dtype)  # a cache in a narrower float dtype is converted
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASK:
        scores = tl.where(key_position[None, :] <= row_position[:, None], scores, -1.0e30)
        if WINDOW:
            seen = key_position[None, :] > row_position[:, None] - WINDOW
            scores = tl.where(seen, scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=1)
    values = kv_ptr + (kv_row + PAGE)[:, None] * DIM + dim[None, :]
    # An earlier owner may have left anything past the end, even NaN.
    v = tl.load(values, mask=there, other=0.0) if MASK else tl.load(values)
    v = v.to(q.dtype)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_peak, weight, acc


@triton.jit
def with_sinks(peak, weight, sinks_ptr, head, there):
    """Initial streamed softmax of rows: includes the sinks of their heads. With several splits only
    the first one may include them. sinks_ptr: None for no sinks."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32)
        peak = tl.where(there, sink * 1.4426950408889634, peak)
        weight = tl.where(there, 1.0, weight)
    return peak, weight


@triton.jit
def _attend(
    q_ptr, kv_ptr, first_page, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr = 0, EARLY: tl.constexpr = False,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    first = tl.load(first_ptr + tile).to(tl.int64)
    table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
    blocks = tl.cdiv(position + length, KEYS)
    if WINDOW:
        before = first_block(position, KEYS, WINDOW)
        blocks -= before
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), MIN_BLOCKS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, blocks)
    if WINDOW:
        begin += before
        end += before
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length > 0:
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM)
        token = row // group
        valid = token < tl.minimum(length, tile_size)
        q_row = (first + token) * q_heads + kv_head * group + row % group
        q = tl.load(q_ptr + q_row[:, None] * DIM + dim[None, :], mask=valid[:, None], other=0.0)
        row_position = position + tl.minimum(token, length - 1)

        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        head = kv_head * group + row % group
        peak, weight = with_sinks(peak, weight, sinks_ptr, head, valid & (split == 0))
        masked_from = begin
        # In long tiles without a window only the last blocks need a mask.
        if ROWS > 16 and WINDOW == 0:
            masked_from = tl.maximum(tl.minimum((position + 1) // KEYS, end), begin)
            for block in tl.range(begin, masked_from, num_stages=STAGES):
                peak, weight, acc = visit(
                    block, q, peak, weight, acc, kv_ptr, table, table_stride, first_page, kv_head,
                    row_position,
                    scale, kv_heads, DIM, PAGE, KEYS, False,
                )  # fmt: skip
        for block in tl.range(masked_from, end, num_stages=STAGES):
            peak, weight, acc = visit(
                block, q, peak, weight, acc, kv_ptr, table, table_stride, first_page, kv_head,
                row_position,
                scale, kv_heads, DIM, PAGE, KEYS, True, WINDOW,
            )  # fmt: skip

        if per_split >= blocks:  # the first split has visited everything
            if split == 0:
                out = acc / weight[:, None]
                target = out_ptr + q_row[:, None] * DIM + dim[None, :]
                tl.store(target, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])
        elif begin < end:
            part = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS + row
            tl.store(part_ptr + part[:, None] * DIM + dim[None, :], acc, mask=valid[:, None])
            tl.store(peak_ptr + part, peak, mask=valid)
            tl.store(weight_ptr + part, weight, mask=valid)


def paged_attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    config: Config | HopperConfig,
    *,
    tile_size: int,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> Array:
    """See `reference.paged_attention`. Separate kernels compute the decode rows, if there are
    any."""
    result = _attention(
        q, kv, layer, page_table, tiles, tile_size, config,
        window=window, sinks=sinks, target=target,
    )  # fmt: skip
    if tiles.decode_rows is None:
        return result
    from jaxserve_kernels.paged_attention import triton_decode_rows

    out = jax.new_ref(result)
    triton_decode_rows.attend(
        q, kv, layer, page_table, tiles.decode_rows, out,
        window=window, sinks=sinks, target=target,
    )  # fmt: skip
    return jax.freeze(out)


def _attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    tile_size: int,
    config: Config | HopperConfig,
    *,
    window: int | None,
    sinks: Array | None,
    target: Target,
) -> Array:
    """Attention of `tiles` without its decode rows."""
    kv_heads, head_dim = kv.shape[2], kv.shape[5]
    q_heads, num_tiles = q.shape[1], tiles.first.shape[0]
    rows = max(16, triton.next_power_of_2(tile_size * (q_heads // kv_heads)))
    launch = hopper.launch if isinstance(config, HopperConfig) else _launch
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = part_types(num_tiles, kv_heads, config.splits, rows, head_dim)
    result, *sums = launch(
        q,
        kv,
        layer,
        page_table,
        tiles,
        tile_size,
        config,
        rows,
        (whole, *parts),
        window=window,
        sinks=sinks,
        target=target,
    )
    keys = config.keys if isinstance(config, HopperConfig) else block_keys(kv)
    return merged(
        result, sums, tiles, config, tile_size=tile_size, keys=keys, window=window, target=target
    )


def block_keys(kv: Array) -> int:
    """Keys per block: those of a page, or of several small pages."""
    return max(kv.shape[4], 64)


def _launch(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    tile_size: int,
    config: Config,
    rows: int,
    types: tuple[jax.ShapeDtypeStruct, ...],
    *,
    window: int | None,
    sinks: Array | None,
    target: Target,
) -> list[Array]:
    num_pages, kv_heads, _, page_size, head_dim = kv.shape[1:]
    return triton_call(
        q, kv, layer * num_pages, page_table, *tiles[:4], sinks,
        kernel=_attend,
        name="paged_attention",
        target=target,
        out_type=types,
        grid=(tiles.first.shape[0], kv_heads, config.splits),
        num_warps=config.num_warps,
        table_stride=page_table.shape[1],
        scale=head_dim**-0.5 * LOG2_E,
        q_heads=q.shape[1], kv_heads=kv_heads, tile_size=tile_size,
        ROWS=rows, DIM=head_dim, PAGE=page_size, KEYS=block_keys(kv),
        SPLITS=config.splits, MIN_BLOCKS=config.min_blocks, STAGES=config.num_stages,
        WINDOW=window or 0,
    )  # fmt: skip
