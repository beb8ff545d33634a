"""Paged attention of long query tiles on Hopper: a producer warp and two consumer warpgroups.

A program takes every n-th tile for one KV head. If there are few tiles, several programs split the
context of a tile. A program's rows are the tile's tokens times the query heads that share the KV
head, 64 rows for each of two warpgroups. The producer warp walks the page table and copies the keys
and values of one block at a time into a ring in shared memory (TMA). A block is a page; with heads
of 256 half a page. Each warpgroup issues the scores of the next block before it computes the
softmax of this one, and overlaps the product with the values too, as in FlashAttention-3 (Shah et
al., 2024).
"""

from __future__ import annotations

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jaxserve_kernels.paged_attention.config import LOG2_E, HopperConfig, tile_tokens
from jaxserve_kernels.paged_attention.hopper_pages import copy_tiles, length_of, share_of
from jaxserve_kernels.paged_attention.hopper_visits import (
    WARPGROUP_ROWS,
    first_visit,
    last_values,
    more_visits,
)
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

_MORE_TILES = 16
"""Programs beyond one per whole tile, for the partial tiles at the ends of chunks. A step has room
for far more tiles, but an idle program costs its multiprocessor 0.8 µs. With more tiles, a program
takes several."""

_MORE_SPLIT_TILES = 1
"""The same in steps with splits, where each tile has several programs."""

_MOST_IN_REGISTERS = gl.constexpr(128)
"""Up to this dimension of heads, queries stay in registers. Otherwise the sums leave no room."""


@gluon.jit
def _queries(source, mask, q_tiles, part: gl.constexpr, s_layout: gl.constexpr):
    """Loads queries [rows, dim]. Returns them in registers, or large heads in shared memory."""
    q = gl.load(source, mask=mask, other=0.0)
    if q.shape[1] > _MOST_IN_REGISTERS:
        q_tile = q_tiles.index(part)
        q_tile.store(q)
        fence_async_shared()
        gl.barrier()
        q = q_tile
    else:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, s_layout, 2))
    return q


@gluon.jit
def _attend(
    q_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, q_tiles, blocks, ready, free, base,
    first, length, position, kv_head, begin, end, alone, split, part_row,
    part: gl.constexpr, scale: gl.constexpr, q_heads: gl.constexpr, group: gl.constexpr,
    TOKENS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Attention of warpgroup `part`, the tile's tokens from part * TOKENS on, over the blocks
    begin..end of the context. They are the program's blocks from number `base` on."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)

    row = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, flat))
    token = part * TOKENS + row // group
    valid = (row < TOKENS * group) & (token < length)
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, flat)), 0)
    q_row = (first + token).to(gl.int64) * q_heads + kv_head * group + row % group
    places = gl.expand_dims(q_row, 1) * DIM + dim
    mask = gl.expand_dims(valid, 1)
    q = _queries(q_ptr + places, mask, q_tiles, part, s_layout)

    last = position + length - 1
    full = (position + 1) // KEYS  # blocks that are visible to all rows
    row_token = part * TOKENS + gl.arange(0, WARPGROUP_ROWS, row_s) // group
    row_position = position + gl.minimum(row_token, length - 1)
    p, acc, peak, weight = first_visit(
        q, sinks_ptr, blocks, ready, base, begin, end, row_position, kv_head, split,
        scale, group, TOKENS, DIM, KEYS, STAGES, WINDOW, s_layout, o_layout,
    )  # fmt: skip
    p, acc, peak, weight = more_visits(
        q, p, acc, peak, weight, blocks, ready, free, base, begin, end, full, last,
        row_position, scale, KEYS, STAGES, WINDOW, s_layout, o_layout,
    )  # fmt: skip
    acc = last_values(p, acc, blocks, free, base, begin, end, last, KEYS, STAGES, flat)

    if alone:
        out = acc / gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, o_layout)), 1)
        gl.store(out_ptr + places, gl.convert_layout(out.to(gl.bfloat16), flat), mask=mask)
    elif SPLITS > 1:
        part_places = (part_row + gl.expand_dims(part * TOKENS * group + row, 1)).to(gl.int64)
        gl.store(part_ptr + part_places * DIM + dim, gl.convert_layout(acc, flat), mask=mask)
        stat = gl.arange(0, WARPGROUP_ROWS, row_s)
        held = (stat < TOKENS * group) & (row_token < length)
        place = part_row + part * TOKENS * group + stat
        gl.store(peak_ptr + place, peak, mask=held)
        gl.store(weight_ptr + place, weight, mask=held)


@gluon.jit
def _attend_tiles(
    q_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, q_tiles, blocks, ready, free,
    first_ptr, length_ptr, slot_ptr, position_ptr, kv_head, tile, split, step,
    part: gl.constexpr, scale: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
    SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Runs warpgroup `part` over the program's tiles: every `step`-th one."""
    base = 0
    while length_of(length_ptr, tile, TILES) > 0:
        first, length, _, position, begin, end, alone = share_of(
            tile,
            split,
            first_ptr,
            length_ptr,
            slot_ptr,
            position_ptr,
            KEYS,
            SPLITS,
            MIN_BLOCKS,
            WINDOW,
        )
        if begin < end:  # a short context has fewer splits
            _attend(
                q_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, q_tiles, blocks, ready,
                free, base, first, length, position, kv_head, begin, end, alone, split,
                ((tile * kv_heads + kv_head) * SPLITS + split) * ROWS,
                part, scale, q_heads, q_heads // kv_heads, TOKENS, DIM, KEYS, SPLITS, STAGES,
                WINDOW,
            )  # fmt: skip
            base += end - begin
        tile += step


@gluon.jit
def _program(
    q_ptr, kv, first_page, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    table_stride, scale: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    TILES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    split = gl.program_id(1)
    tile = gl.program_id(2)
    if gl.load(length_ptr + tile) == 0:
        return
    step = gl.num_programs(2)
    blocks = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, KEYS, DIM], kv.layout)
    q_tiles = blocks
    if DIM > _MOST_IN_REGISTERS:
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, WARPGROUP_ROWS, DIM], kv.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend_tiles, (
                q_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, q_tiles, blocks, ready,
                free, first_ptr, length_ptr, slot_ptr, position_ptr, kv_head, tile, split, step,
                0, scale, q_heads, kv_heads, TOKENS, ROWS, DIM, KEYS, SPLITS, MIN_BLOCKS, STAGES,
                TILES, WINDOW,
            )),
            (_attend_tiles, (
                q_ptr, sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, q_tiles, blocks, ready,
                free, first_ptr, length_ptr, slot_ptr, position_ptr, kv_head, tile, split, step,
                1, scale, q_heads, kv_heads, TOKENS, ROWS, DIM, KEYS, SPLITS, MIN_BLOCKS, STAGES,
                TILES, WINDOW,
            )),
            (copy_tiles, (
                kv, first_page * (kv_heads * 2 * PAGE), table_ptr, table_stride, blocks, ready,
                free, first_ptr, length_ptr, slot_ptr, position_ptr, kv_head, tile, split, step,
                kv_heads, DIM, PAGE, KEYS, SPLITS, MIN_BLOCKS, STAGES, TILES, WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    tile_size: int,
    config: HopperConfig,
    rows: int,
    types: tuple[jax.ShapeDtypeStruct, ...],
    *,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> list[Array]:
    """Returns the result, written for tiles whose whole context one split has visited; and the
    sums, peaks and weights of the splits of other tiles."""
    num_pages, kv_heads, _, page_size, head_dim = kv.shape[1:]
    q_heads = q.shape[1]
    places = tiles.first.shape[0]
    more = _MORE_TILES if config.splits == 1 else _MORE_SPLIT_TILES
    programs = min(places, q.shape[0] // tile_size + more)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kv_rows = tensor_descriptor(kv.reshape(-1, head_dim), (config.keys, head_dim), layout)
    return triton_call(
        q, kv_rows, layer * num_pages, page_table, *tiles[:4], sinks,
        kernel=_program,
        name="paged_attention_hopper",
        target=target,
        out_type=types,
        grid=(kv_heads, config.splits, programs),
        num_warps=4,
        table_stride=page_table.shape[1],
        scale=head_dim**-0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads,
        TOKENS=tile_tokens(q_heads // kv_heads) // 2, ROWS=rows, DIM=head_dim, PAGE=page_size,
        KEYS=config.keys, SPLITS=config.splits, MIN_BLOCKS=config.min_blocks,
        STAGES=config.num_stages, TILES=places, WINDOW=window or 0,
    )  # fmt: skip
