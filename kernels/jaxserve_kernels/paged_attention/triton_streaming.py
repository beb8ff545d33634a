"""Attention of single tokens, launched early (PDL): pages that earlier steps have written are
copied before this step's queries exist.

A program takes one token, KV head and split of the context. It first fills a ring in shared memory
with pages, and then waits for earlier kernels. From the projection's partial sums it computes the
queries that share the KV head, the token's key and its value, so no kernel is needed between
projection and attention. The split that contains the new key's page visits that key first, and
writes the key and the value into the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.paged_attention.triton_heads import head_constants, normed_and_rotated
from jaxserve_kernels.paged_attention.triton_merge import merged, part_types
from jaxserve_kernels.paged_attention.triton_visits import MASKED, pages_of_split
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_PAGE = 64
_ROWS = 16
"""Rows of a program: the queries that share a KV head, its key and its value, and padding."""


@gluon.jit
def _copy(
    kv_ptr, page, keys, values, block, stage, position, kv_head,
    kv_heads: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, layout: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies a page's keys and values; zeros from the new token on, and before the window."""
    place = gl.arange(0, PAGE, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    row = (page.to(gl.int64) * kv_heads + kv_head) * (2 * PAGE) + place
    there = gl.expand_dims(block * PAGE + place < position, 1)
    if WINDOW:
        there = there & gl.expand_dims(block * PAGE + place > position - WINDOW, 1)
    source = kv_ptr + gl.expand_dims(row, 1) * DIM + dim
    async_copy.async_load(keys.index(stage), source, mask=there)
    async_copy.async_load(values.index(stage), source + PAGE * DIM, mask=there)


@gluon.jit
def _joined(low, high):
    """Concatenates the halves of rows."""
    return gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [low.shape[0], 2 * low.shape[1]])


@gluon.jit
def _attend(
    qkv_ptr, kv_ptr, first_page, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr,
    page_ptr, offset_ptr, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    stride: gl.constexpr, table_stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr,
    scale: gl.constexpr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr,
    PAGE: gl.constexpr, SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr = 0, EARLY: gl.constexpr = False,
):  # fmt: skip
    HALF: gl.constexpr = DIM // 2
    group: gl.constexpr = q_heads // kv_heads
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, HALF // 16], [8, 4], [1, 4], [1, 0])
    flat_row: gl.constexpr = gl.SliceLayout(1, flat)
    flat_dim: gl.constexpr = gl.SliceLayout(0, flat)
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    sums_row: gl.constexpr = gl.SliceLayout(1, sums)
    sums_dim: gl.constexpr = gl.SliceLayout(0, sums)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

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

    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAGE, DIM], tile_layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAGE, DIM], tile_layout)
    pages = ()
    for stage in gl.static_range(STAGES):  # all copies in flight at once
        page = gl.load(table + gl.minimum(begin + stage, end - 1))
        pages = pages + (page,)  # noqa: RUF005  (Triton knows no other way)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _copy(
                kv_ptr, first_page + pages[stage], keys, values, begin + stage, stage, position,
                kv_head, kv_heads, DIM, PAGE, copy, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()

    row = gl.arange(0, ROWS, flat_row)
    dim = gl.expand_dims(gl.arange(0, HALF, flat_dim), 0)
    is_query = gl.expand_dims(row < group, 1)
    is_key = gl.expand_dims(row == group, 1)
    is_value = gl.expand_dims(row == group + 1, 1)
    head = gl.where(row < group, kv_head * group + row, q_heads + kv_head)
    head = gl.expand_dims(gl.where(row == group + 1, q_heads + kv_heads + kv_head, head), 1)
    constants = head_constants(
        q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, head, is_query, HALF, 2, flat
    )
    if sinks_ptr is not None:
        query = gl.arange(0, ROWS, sums_row)
        there = (query < group) & (split == 0)
        sink = gl.load(sinks_ptr + kv_head * group + query, mask=there, other=0.0)
    new_page = first_page + gl.load(page_ptr + token)
    new_offset = gl.load(offset_ptr + token)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + head) * DIM + dim
    wide_low, wide_high = normed_and_rotated(
        source, is_value, is_query | is_key | is_value, constants,
        stride, parts, eps, ROWS, HALF, 2, flat, EARLY,
    )  # fmt: skip
    low = wide_low.to(gl.bfloat16)
    high = wide_high.to(gl.bfloat16)
    q = gl.convert_layout(_joined(low, high), left)

    peak = gl.full([ROWS], MASKED, gl.float32, sums_row)
    weights = gl.zeros([ROWS, PAGE], gl.float32, sums)
    acc = gl.zeros([ROWS, DIM], gl.float32, sums)
    own_weight = 0.0
    if owner:
        kv_row = (new_page.to(gl.int64) * kv_heads + kv_head) * (2 * PAGE) + new_offset
        target = kv_ptr + (kv_row + gl.where(is_value, PAGE, 0)) * DIM + dim
        gl.store(target, low, mask=is_key | is_value)
        gl.store(target + HALF, high, mask=is_key | is_value)
        key_low = gl.sum(gl.where(is_key, wide_low, 0.0), axis=0)
        key_high = gl.sum(gl.where(is_key, wide_high, 0.0), axis=0)
        score = gl.sum(
            wide_low * gl.expand_dims(key_low, 0) + wide_high * gl.expand_dims(key_high, 0), axis=1
        )
        peak = gl.convert_layout(score * scale, sums_row)
        value_low = gl.sum(gl.where(is_value, wide_low, 0.0), axis=0)
        value_high = gl.sum(gl.where(is_value, wide_high, 0.0), axis=0)
        value = gl.reshape(gl.permute(gl.join(value_low, value_high), (1, 0)), [DIM])
        acc += gl.expand_dims(gl.convert_layout(value, sums_dim), 0)
        own_weight = 1.0

    zeros = gl.zeros([ROWS, PAGE], gl.float32, sums)
    new_weight = gl.full([ROWS], 1.0, gl.float32, sums_row) * own_weight
    if sinks_ptr is not None:  # noqa: SIM102  (known when it is compiled)
        if split == 0:
            scaled = sink.to(gl.float32) * 1.4426950408889634
            new_peak = gl.maximum(peak, scaled)
            shrink = gl.exp2(peak - new_peak)
            new_weight = new_weight * shrink + gl.exp2(scaled - new_peak)
            acc = acc * gl.expand_dims(shrink, 1)
            peak = new_peak
    for block in range(begin, end):
        slot = (block - begin) % STAGES
        async_copy.wait_group(STAGES - 1)
        gl.barrier()
        scores = mma_v2(q, keys.index(slot).permute((1, 0)).load(right), zeros) * scale
        key = block * PAGE + gl.arange(0, PAGE, sums_dim)
        scores = gl.where(gl.expand_dims(key < position, 0), scores, MASKED)
        if WINDOW:
            scores = gl.where(gl.expand_dims(key > position - WINDOW, 0), scores, MASKED)
        new_peak = gl.maximum(peak, gl.max(scores, axis=1))
        shrink = gl.exp2(peak - new_peak)
        probs = gl.exp2(scores - gl.expand_dims(new_peak, 1))
        peak = new_peak
        weights = weights * gl.expand_dims(shrink, 1) + probs
        new_weight = new_weight * shrink
        p = gl.convert_layout(probs.to(gl.bfloat16), left)
        acc = mma_v2(p, values.index(slot).load(right), acc * gl.expand_dims(shrink, 1))
        if block + STAGES < end:
            gl.barrier()
            _copy(
                kv_ptr, first_page + gl.load(table + block + STAGES), keys, values,
                block + STAGES, slot, position, kv_head, kv_heads, DIM, PAGE, copy, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()
    weight = gl.sum(weights, axis=1) + new_weight

    query = gl.arange(0, ROWS, sums_row)
    out_dim = gl.expand_dims(gl.arange(0, DIM, sums_dim), 0)
    valid = gl.expand_dims(query < group, 1)
    if per_split >= blocks:  # the first split has visited everything
        out = acc / gl.expand_dims(weight, 1)
        out_row = token * q_heads + kv_head * group + gl.expand_dims(query, 1)
        gl.store(out_ptr + out_row * DIM + out_dim, out.to(gl.bfloat16), mask=valid)
    elif SPLITS > 1:
        place = ((tile * kv_heads + kv_head) * SPLITS + split).to(gl.int64) * ROWS + query
        gl.store(part_ptr + gl.expand_dims(place, 1) * DIM + out_dim, acc, mask=valid)
        gl.store(peak_ptr + place, peak, mask=query < group)
        gl.store(weight_ptr + place, weight, mask=query < group)


def fits(qkv: Array, kv: Array, dtype: DTypeLike) -> bool:
    """Whether this kernel supports these heads and pages. Others use the kernels for any sizes."""
    kv_heads, _, page_size, head_dim = kv.shape[2:]
    heads = qkv.shape[2] // (head_dim * kv_heads)  # with a key's and a value's
    return (
        kv.dtype == dtype == jnp.bfloat16
        and page_size == _PAGE
        and head_dim in (64, 128)
        and heads <= _ROWS
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
    num_pages, kv_heads, _, _, head_dim = kv.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = width // head_dim - 2 * kv_heads
    num_tiles = tiles.first.shape[0]
    cache = jax.new_ref(kv)
    out, *sums = triton_call(
        qkv, cache, layer * num_pages, *heads.of_inputs, *tables, *slots, page_table, *tiles[:4],
        heads.sinks,
        kernel=_attend,
        name="paged_attention",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((tokens, q_heads, head_dim), kv.dtype),
            *part_types(num_tiles, kv_heads, config.splits, _ROWS, head_dim),
        ),
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=4,
        stride=tokens * width, table_stride=page_table.shape[1],
        parts=parts, eps=eps, scale=head_dim**-0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=_ROWS, DIM=head_dim, PAGE=_PAGE,
        SPLITS=config.splits, MIN_BLOCKS=config.min_blocks, STAGES=config.num_stages,
        WINDOW=window or 0,
    )  # fmt: skip
    out = merged(out, sums, tiles, config, tile_size=1, keys=_PAGE, window=window, target=target)
    return out, jax.freeze(cache)
