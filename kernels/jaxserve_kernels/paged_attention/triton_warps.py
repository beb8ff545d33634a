"""Attention of single tokens as in `triton_streaming`, with one softmax per warp: over bfloat16,
int8 and e4m3 caches.

A program's four warps share the keys of each page, and their results are added once, at the end.
8-bit keys and values enter the products unscaled: the keys' scales multiply the scores, the values'
scales the probabilities (int8) or the result (e4m3).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots
from jaxserve_kernels.paged_attention.config import LOG2_E, Config, limits_of
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.paged_attention.triton_heads import token_heads, write_heads
from jaxserve_kernels.paged_attention.triton_merge import merged, part_types
from jaxserve_kernels.paged_attention.triton_visits import (
    BF16,
    FP8,
    copy_page,
    for_each_warp,
    pages_of_split,
    visit_page,
)
from jaxserve_kernels.paged_attention.triton_warps_softmax import finish, own_key
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_PAGE = 64
_MOST_ROWS = 16
"""The most rows of a program: the queries that share a KV head, its key and its value."""


@gluon.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, kv_ptr, scales_ptr,
    page_ptr, offset_ptr, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    layer, first_page,
    stride: gl.constexpr, table_stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr,
    scale: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    ROWS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    WINDOW: gl.constexpr = 0, EARLY: gl.constexpr = False,
):  # fmt: skip
    """One program per tile, KV head and split. `scales_ptr`: the scales of the format's cache;
    ignored for bfloat16."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = PAGE // WARPS
    TILES: gl.constexpr = 4 if KIND == BF16 else 2
    group: gl.constexpr = q_heads // kv_heads
    flat: gl.constexpr = gl.BlockedLayout([1, HALF // 32], [1, 32], [WARPS, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // HALF, HALF // 8, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    length = gl.load(length_ptr + tile)
    position = gl.load(position_ptr + tile)
    token = gl.load(first_ptr + tile).to(gl.int64)
    table = table_ptr + gl.load(slot_ptr + tile).to(gl.int64) * table_stride
    begin, end, owner, blocks, per_split = pages_of_split(
        position, split, PAGE, SPLITS, MIN_BLOCKS, WINDOW
    )
    if EARLY:
        gdc_launch_dependents()
    if begin >= end:
        return
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
        return

    # Each buffer has two views: one for copies into it, and one for reads.
    ring = gl.allocate_shared_memory(gl.int16, [STAGES, TILES, PAGE, HALF], spread)
    tiles = ring.reinterpret(gl.int16, [STAGES * TILES, WARPS, KEYS, HALF], spread)
    scales_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, PAGE], plain)
    scales = scales_ring.reinterpret(gl.float32, [STAGES * 2, WARPS, KEYS], plain)
    _fill(
        kv_ptr, scales_ptr, first_page, table, ring, scales_ring, begin, end, position, kv_head,
        kv_heads, KIND, WINDOW,
    )  # fmt: skip
    low, high, key_scale, value_scale = _own_heads(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, kv_ptr, scales_ptr, page_ptr,
        offset_ptr, layer, first_page, token, kv_head, owner, stride, parts, eps, q_heads, kv_heads,
        ROWS, HALF, PAGE, KIND, flat, EARLY,
    )  # fmt: skip
    heads_mem, q_low, q_high = _shared(low, high, sums, KIND)

    peak, weights, acc_low, acc_high = own_key(
        low, high, heads_mem, key_scale, value_scale, owner, scale, group, sums, KEYS, KIND
    )  # fmt: skip
    score_scale = scale * key_scale if KIND == FP8 else scale * 1.0
    peak, weights, acc_low, acc_high = _visit_pages(
        kv_ptr, scales_ptr, first_page, table, ring, scales_ring, tiles, scales, q_low, q_high,
        peak, weights, acc_low, acc_high, score_scale, begin, end, position, kv_head, kv_heads,
        KIND, WINDOW,
    )  # fmt: skip
    finish(
        ring, peak, weights, acc_low, acc_high, value_scale, sinks_ptr, out_ptr, part_ptr, peak_ptr,
        weight_ptr, token, tile, kv_head, split, per_split >= blocks, q_heads, kv_heads,
        SPLITS, KIND, flat,
    )  # fmt: skip


@gluon.jit
def _fill(
    kv_ptr, scales_ptr, first_page, table, ring, scales_ring, begin, end, position, kv_head,
    kv_heads: gl.constexpr, KIND: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies the first pages into the ring, all in flight at once."""
    STAGES: gl.constexpr = ring.shape[0]
    PAGE: gl.constexpr = ring.shape[2]
    pages = ()
    for stage in gl.static_range(STAGES):
        page = gl.load(table + gl.minimum(begin + stage, end - 1))
        pages = pages + (page,)  # noqa: RUF005  (Triton knows no other way)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            row = ((first_page + pages[stage]).to(gl.int64) * kv_heads + kv_head) * (2 * PAGE)
            copy_page(
                kv_ptr, scales_ptr, row, position - (begin + stage) * PAGE,
                ring.index(stage), scales_ring.index(stage), PAGE, ring.shape[3], KIND, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()


@gluon.jit
def _own_heads(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, kv_ptr, scales_ptr, page_ptr,
    offset_ptr, layer, first_page, token, kv_head, owner,
    stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr, q_heads: gl.constexpr,
    kv_heads: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    KIND: gl.constexpr, flat: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The token's own heads, as halves [rows, half], and the scales of its key and value. The
    `owner` writes these to the cache."""
    group: gl.constexpr = q_heads // kv_heads
    new_page = first_page + gl.load(page_ptr + token)
    new_row = (new_page.to(gl.int64) * kv_heads + kv_head) * (2 * PAGE)
    new_row += gl.load(offset_ptr + token)
    key_scale = 1.0
    value_scale = 1.0
    if KIND == FP8:
        of_head = scales_ptr + (layer * kv_heads + kv_head) * 2
        key_scale = gl.load(of_head)
        value_scale = gl.load(of_head + 1)
    low, high = token_heads(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, kv_head,
        stride, parts, q_heads, kv_heads, eps, ROWS, HALF, 2, flat, EARLY,
    )  # fmt: skip
    row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    is_new = (row == group) | (row == group + 1)
    if owner:
        low, high, key_scale, value_scale = write_heads(
            low, high, is_new, kv_ptr, scales_ptr, new_row, key_scale, value_scale, group, PAGE,
            KIND,
        )  # fmt: skip
    return low, high, key_scale, value_scale


@gluon.jit
def _shared(low, high, sums: gl.constexpr, KIND: gl.constexpr):
    """Halves of heads [rows, half] in shared memory, and as operands of every warp, in the dtype of
    products."""
    dtype: gl.constexpr = gl.bfloat16 if KIND == BF16 else gl.float16
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    heads_mem = gl.allocate_shared_memory(dtype, [2, low.shape[0], low.shape[1]], plain)
    heads_mem.index(0).store(low.to(dtype))
    heads_mem.index(1).store(high.to(dtype))
    q_low = for_each_warp(heads_mem.index(0), right)
    q_high = for_each_warp(heads_mem.index(1), right)
    return heads_mem, q_low, q_high


@gluon.jit
def _visit_pages(
    kv_ptr, scales_ptr, first_page, table, ring, scales_ring, tiles, scales, q_low, q_high,
    peak, weights, acc_low, acc_high, score_scale, begin, end, position, kv_head,
    kv_heads: gl.constexpr, KIND: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Visits the pages from `begin` to `end`. The next ones are copied meanwhile."""
    STAGES: gl.constexpr = ring.shape[0]
    PAGE: gl.constexpr = ring.shape[2]
    for block in range(begin, end):
        place = (block - begin) % STAGES
        page = gl.load(table + gl.minimum(block + STAGES, end - 1))
        async_copy.wait_group(STAGES - 1)
        gl.barrier()
        peak, weights, acc_low, acc_high = visit_page(
            tiles, scales, place, position - block * PAGE, q_low, q_high,
            peak, weights, acc_low, acc_high, score_scale, KIND, WINDOW,
        )  # fmt: skip
        if block + STAGES < end:
            gl.barrier()
            at = ((first_page + page).to(gl.int64) * kv_heads + kv_head) * (2 * PAGE)
            copy_page(
                kv_ptr, scales_ptr, at, position - (block + STAGES) * PAGE,
                ring.index(place), scales_ring.index(place), PAGE, ring.shape[3], KIND, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()
    return peak, weights, acc_low, acc_high


def heuristic(*, tiles: int, kv_heads: int, kind: gl.constexpr, target: Target) -> Config:
    """A configuration for `tiles` single tokens.

    Ring stages take shared memory from the next kernel, which copies its weights meanwhile. Two
    stages are best, or three in bfloat16 if each program has a long context. The context of a lone
    token is split further, so that no program has much to visit.
    """
    limits = limits_of(target)
    programs = (1 if tiles > 1 else 2) * limits.warps_programs * target.gpu.multiprocessors
    splits = max(1, min(programs // (tiles * kv_heads), 64))
    stages = 3 if kind.value == BF16.value and tiles <= limits.warps_three_pages else 2
    return Config(splits=splits, num_warps=4, num_stages=stages, min_blocks=2)


def fits(qkv: Array, kv: Array, dtype: DTypeLike) -> bool:
    """Whether this kernel supports these heads and pages, in bfloat16 or 8-bit words."""
    kv_heads, _, page_size, width = kv.shape[2:]
    dense = kv.dtype == jnp.bfloat16
    head_dim = width if dense else 2 * width
    heads = qkv.shape[2] // (head_dim * kv_heads)  # with a key's and a value's
    return (
        dtype == jnp.bfloat16
        and (dense or kv.dtype == jnp.int16)
        and page_size == _PAGE
        and (head_dim == 128 or (dense and head_dim == 64))
        and heads <= _MOST_ROWS
    )


def attend(
    qkv: Array,
    kv: Array,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    slots: KVSlots,
    page_table: Array,
    tiles: QueryTiles,
    config: Config,
    *,
    eps: float,
    window: int | None = None,
    target: Target,
) -> tuple[Array, Array]:
    """`attention_inputs`, then `paged_attention` of tiles of one token. Returns its result, and
    kv."""
    cache = jax.new_ref(kv)
    out = launch(
        qkv,
        cache,
        tables[0],
        layer,
        heads,
        tables,
        slots,
        page_table,
        tiles,
        config,
        eps=eps,
        kind=BF16, window=window,
        target=target,
    )  # fmt: skip
    return out, jax.freeze(cache)


def launch(
    qkv: Array,
    kv: jax.Ref,
    scales: Array | jax.Ref,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    slots: KVSlots,
    page_table: Array,
    tiles: QueryTiles,
    config: Config,
    *,
    eps: float,
    kind: gl.constexpr,
    window: int | None = None,
    target: Target,
) -> Array:
    """Returns attention [tokens, q_heads, head_dim] of tiles of one token, and writes their keys
    and values to `kv`. An element of its last axis is one bfloat16 element, or a word with an 8-bit
    element of each half of a head."""
    num_pages, kv_heads, _, page_size, width = kv.shape[1:]
    half = width // 2 if kind.value == BF16.value else width
    parts, tokens, columns = qkv.shape
    q_heads, num_tiles = columns // (2 * half) - 2 * kv_heads, tiles.first.shape[0]
    rows = 8 if q_heads // kv_heads + 2 <= 8 else _MOST_ROWS  # columns of products
    out, *sums = triton_call(
        qkv, *heads.of_inputs, *tables, kv, scales, *slots, page_table, *tiles[:4],
        heads.sinks,
        kernel=_attend,
        name="paged_attention",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((tokens, q_heads, 2 * half), jnp.bfloat16),
            *part_types(num_tiles, kv_heads, config.splits, rows, 2 * half),
        ),
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=config.num_warps,
        layer=layer, first_page=layer * num_pages,
        stride=tokens * columns, table_stride=page_table.shape[1], parts=parts, eps=eps,
        scale=(2 * half) ** -0.5 * LOG2_E, q_heads=q_heads, kv_heads=kv_heads,
        ROWS=rows, HALF=half, PAGE=page_size,
        SPLITS=config.splits, MIN_BLOCKS=config.min_blocks, STAGES=config.num_stages,
        KIND=kind.value, WINDOW=window or 0,
    )  # fmt: skip
    return merged(
        out, sums, tiles, config, tile_size=1, keys=page_size, window=window, target=target
    )
