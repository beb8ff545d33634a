"""Parts of `hopper.py`: how blocks of a tile are divided over splits, and the producer warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _copy(
    kv, table, blocks, ready, free, base, begin, end, first_row, kv_head,
    kv_heads: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies keys and values of each block, as soon as both warpgroups have freed a ring stage."""
    of_page: gl.constexpr = PAGE // KEYS
    for block in range(begin, end):
        index = base + block - begin
        stage = index % STAGES
        page = gl.load(table + block // of_page)
        row = first_row + (page * kv_heads + kv_head) * (2 * PAGE) + block % of_page * KEYS
        mbarrier.wait(free.index(stage), ((index // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 2 * KEYS * DIM * 2)
        tma.async_load(kv, [row, 0], ready.index(stage), blocks.index(2 * stage))
        tma.async_load(kv, [row + PAGE, 0], ready.index(stage), blocks.index(2 * stage + 1))


@gluon.jit
def share_of(
    tile, split, first_ptr, length_ptr, slot_ptr, position_ptr,
    KEYS: gl.constexpr, SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads a tile, and computes which blocks of its context the split visits."""
    first = gl.load(first_ptr + tile)
    length = gl.load(length_ptr + tile)
    slot = gl.load(slot_ptr + tile).to(gl.int64)
    position = gl.load(position_ptr + tile)
    context = (position + length - 1) // KEYS + 1
    before = 0
    if WINDOW:
        before = gl.maximum(position - WINDOW + 1, 0) // KEYS
        context -= before
    per_split = gl.maximum((context + SPLITS - 1) // SPLITS, MIN_BLOCKS)
    begin = split * per_split
    return (
        first,
        length,
        slot,
        position,
        before + begin,
        before + gl.minimum(begin + per_split, context),
        (per_split >= context),
    )


@gluon.jit
def length_of(length_ptr, tile, TILES: gl.constexpr):
    return gl.load(length_ptr + tile, mask=tile < TILES, other=0)


@gluon.jit
def copy_tiles(
    kv, first_row, table_ptr, table_stride, blocks, ready, free,
    first_ptr, length_ptr, slot_ptr, position_ptr, kv_head, tile, split, step,
    kv_heads: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    base = 0
    while length_of(length_ptr, tile, TILES) > 0:
        _, _, slot, _, begin, end, _ = share_of(
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
        _copy(
            kv, table_ptr + slot * table_stride, blocks, ready, free, base, begin, end, first_row,
            kv_head, kv_heads, DIM, PAGE, KEYS, STAGES,
        )  # fmt: skip
        base += gl.maximum(end - begin, 0)
        tile += step
