"""Attention of single tokens, launched early (PDL): pages that earlier steps have written are
copied before this step's queries exist.

A program takes one token, KV head and split of the context. It first fills a ring in shared memory
with pages, and then waits for earlier kernels. From the projection's partial sums it computes the
queries that share the KV head, the token's key and its value, so no kernel is needed between
projection and attention. The split that contains the new key's page visits that key first, and
writes the key and the value into the cache.

With gates, RoPE on a part of each head or float32 norm weights, it does what `attention_prologue`
and `gate_heads` define, too.
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
from jaxserve_kernels.paged_attention.triton_merge import merged, part_types
from jaxserve_kernels.paged_attention.triton_streaming_heads import (
    head_weights,
    joined,
    own_heads,
    own_key,
    sigmoid,
)
from jaxserve_kernels.paged_attention.triton_visits import MASKED, pages_of_split
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_PAGE = 64
_ROWS = 16
"""Rows of a program: the queries that share a KV head, its key and its value, and padding."""


@gluon.jit
def _copy(
    kv_ptr, page, keys, values, block, stage, position, kv_head,
    kv_heads: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    layout: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies a block's keys and values; zeros from the new token on, and before the window."""
    place = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    row = (page.to(gl.int64) * kv_heads + kv_head) * (2 * PAGE) + block % (PAGE // KEYS) * KEYS
    there = gl.expand_dims(block * KEYS + place < position, 1)
    if WINDOW:
        there = there & gl.expand_dims(block * KEYS + place > position - WINDOW, 1)
    source = kv_ptr + gl.expand_dims(row + place, 1) * DIM + dim
    async_copy.async_load(keys.index(stage), source, mask=there)
    async_copy.async_load(values.index(stage), source + PAGE * DIM, mask=there)


@gluon.jit
def _with_sink(sink, peak, new_weight, acc):
    """The softmax of rows with their heads' sinks."""
    scaled = sink.to(gl.float32) * 1.4426950408889634
    new_peak = gl.maximum(peak, scaled)
    shrink = gl.exp2(peak - new_peak)
    new_weight = new_weight * shrink + gl.exp2(scaled - new_peak)
    return new_peak, new_weight, acc * gl.expand_dims(shrink, 1)


@gluon.jit
def _visit(
    q, keys, values, block, position, peak, weights, new_weight, acc,
    scale: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Adds a block of keys [keys, dim] and values to the streamed softmax."""
    sums: gl.constexpr = acc.type.layout
    dims: gl.constexpr = gl.SliceLayout(0, sums)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    KEYS: gl.constexpr = keys.shape[0]
    scores = mma_v2(q, keys.permute((1, 0)).load(right), gl.zeros_like(weights)) * scale
    key = block * KEYS + gl.arange(0, KEYS, dims)
    scores = gl.where(gl.expand_dims(key < position, 0), scores, MASKED)
    if WINDOW:
        scores = gl.where(gl.expand_dims(key > position - WINDOW, 0), scores, MASKED)
    new_peak = gl.maximum(peak, gl.max(scores, axis=1))
    shrink = gl.exp2(peak - new_peak)
    probs = gl.exp2(scores - gl.expand_dims(new_peak, 1))
    weights = weights * gl.expand_dims(shrink, 1) + probs
    p = gl.convert_layout(probs.to(gl.bfloat16), left)
    acc = mma_v2(p, values.load(right), acc * gl.expand_dims(shrink, 1))
    return new_peak, weights, new_weight * shrink, acc


@gluon.jit
def _fill(
    kv_ptr, first_page, table, keys, values, begin, end, position, kv_head,
    kv_heads: gl.constexpr, PAGE: gl.constexpr, copy: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies the first blocks into the rings of keys and values [stages, keys, dim], all in flight
    at once."""
    STAGES: gl.constexpr = keys.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    pages = ()
    for stage in gl.static_range(STAGES):
        page = gl.load(table + gl.minimum(begin + stage, end - 1) // (PAGE // KEYS))
        pages = pages + (page,)  # noqa: RUF005  (Triton knows no other way)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _copy(
                kv_ptr, first_page + pages[stage], keys, values, begin + stage, stage, position,
                kv_head, kv_heads, keys.shape[2], PAGE, KEYS, copy, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()


@gluon.jit
def _store(
    acc, peak, weight, of_token, out_ptr, part_ptr, peak_ptr, weight_ptr, token, tile, kv_head,
    split, alone, stride: gl.constexpr, parts: gl.constexpr, q_heads: gl.constexpr,
    kv_heads: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Stores the attention's result, times its gates. If other splits have visited some blocks
    (not `alone`): the sums, for `merged`."""
    ROWS: gl.constexpr = acc.shape[0]
    DIM: gl.constexpr = acc.shape[1]
    group: gl.constexpr = q_heads // kv_heads
    query = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    out_dim = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, acc.type.layout)), 0)
    valid = gl.expand_dims(query < group, 1)
    if alone:
        out = (acc / gl.expand_dims(weight, 1)).to(gl.bfloat16)
        q_head = kv_head * group + gl.expand_dims(query, 1)
        if GATED:
            gate = of_token + (2 * q_head + 1) * DIM + out_dim
            out = (out * sigmoid(gate, valid, stride, parts)).to(gl.bfloat16)
        gl.store(out_ptr + (token * q_heads + q_head) * DIM + out_dim, out, mask=valid)
    elif SPLITS > 1:
        place = ((tile * kv_heads + kv_head) * SPLITS + split).to(gl.int64) * ROWS + query
        gl.store(part_ptr + gl.expand_dims(place, 1) * DIM + out_dim, acc, mask=valid)
        gl.store(peak_ptr + place, peak, mask=query < group)
        gl.store(weight_ptr + place, weight, mask=query < group)


@gluon.jit
def _attend(
    qkv_ptr, kv_ptr, first_page, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr,
    page_ptr, offset_ptr, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, sinks_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    stride: gl.constexpr, table_stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr,
    scale: gl.constexpr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr, HALF: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, DIM: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr = 0, EARLY: gl.constexpr = False,
):  # fmt: skip
    """One program per tile, KV head and split. HALF: half of the dimensions that RoPE rotates.
    GATED: the projection has a gate after each query head."""
    GROUPS: gl.constexpr = DIM // (2 * HALF)
    group: gl.constexpr = q_heads // kv_heads
    queries: gl.constexpr = (1 + GATED) * q_heads
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    WARPS: gl.constexpr = GROUPS if GROUPS < 4 else 4  # that share a row's groups
    flat: gl.constexpr = gl.BlockedLayout(
        [1, 1, min(HALF // (16 // WARPS), 4)], [8, 1, 4], [1, WARPS, 4 // WARPS], [2, 1, 0]
    )
    flat_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, flat))
    flat_group: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, flat))
    flat_half: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, flat))
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    sums_row: gl.constexpr = gl.SliceLayout(1, sums)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    length = gl.load(length_ptr + tile)
    position = gl.load(position_ptr + tile)
    token = gl.load(first_ptr + tile).to(gl.int64)
    table = table_ptr + gl.load(slot_ptr + tile).to(gl.int64) * table_stride
    begin, end, owner, blocks, per_split = pages_of_split(
        position, split, KEYS, SPLITS, MIN_BLOCKS, WINDOW
    )
    if EARLY:
        gdc_launch_dependents()
    if begin >= end:
        return
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
        return

    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], tile_layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], tile_layout)
    _fill(
        kv_ptr, first_page, table, keys, values, begin, end, position,
        kv_head, kv_heads, PAGE, copy, WINDOW,
    )  # fmt: skip
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, flat_row), 1), 2)
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUPS, flat_group), 0), 2) * (2 * HALF)
    dim = dim + gl.expand_dims(gl.expand_dims(gl.arange(0, HALF, flat_half), 0), 1)
    is_value = row > group
    head = gl.where(row < group, (1 + GATED) * (kv_head * group + row), queries + kv_head)
    column = (head + gl.where(is_value, kv_heads, 0)) * DIM + dim
    norms, cos, sin = head_weights(
        q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, row < group, dim, HALF
    )  # fmt: skip
    low = gl.zeros([ROWS, GROUPS, HALF], gl.float32, flat)
    high = low
    if bias_ptr is not None:
        low += gl.load(bias_ptr + column)
        high += gl.load(bias_ptr + column + HALF)
    if sinks_ptr is not None:
        query = gl.arange(0, ROWS, sums_row)
        there = (query < group) & (split == 0)
        sink = gl.load(sinks_ptr + kv_head * group + query, mask=there, other=0.0)
    new_page = first_page + gl.load(page_ptr + token)
    new_offset = gl.load(offset_ptr + token)
    of_token = qkv_ptr + token * ((queries + 2 * kv_heads) * DIM)
    low, high = own_heads(
        of_token + column, low, high, norms, cos, sin, is_value, row < group + 2,
        stride, parts, eps, HALF, flat, EARLY,
    )  # fmt: skip
    q = gl.convert_layout(joined(low.to(gl.bfloat16), high.to(gl.bfloat16)), left)

    peak = gl.full([ROWS], MASKED, gl.float32, sums_row)
    weights = gl.zeros([ROWS, KEYS], gl.float32, sums)
    acc = gl.zeros([ROWS, DIM], gl.float32, sums)
    own_weight = 0.0
    if owner:
        kv_row = (new_page.to(gl.int64) * kv_heads + kv_head) * (2 * PAGE) + new_offset
        target = kv_ptr + (kv_row + gl.where(is_value, PAGE, 0)) * DIM + dim
        peak, value = own_key(target, low, high, row, group, scale, sums)
        acc += gl.expand_dims(value, 0)
        own_weight = 1.0

    new_weight = gl.full([ROWS], 1.0, gl.float32, sums_row) * own_weight
    if sinks_ptr is not None:  # noqa: SIM102  (known when it is compiled)
        if split == 0:
            peak, new_weight, acc = _with_sink(sink, peak, new_weight, acc)
    for block in range(begin, end):
        slot = (block - begin) % STAGES
        async_copy.wait_group(STAGES - 1)
        gl.barrier()
        peak, weights, new_weight, acc = _visit(
            q, keys.index(slot), values.index(slot), block, position, peak, weights, new_weight,
            acc, scale, WINDOW,
        )  # fmt: skip
        if block + STAGES < end:
            gl.barrier()
            page = gl.load(table + (block + STAGES) // (PAGE // KEYS))
            _copy(
                kv_ptr, first_page + page, keys, values,
                block + STAGES, slot, position, kv_head, kv_heads, DIM, PAGE, KEYS, copy, WINDOW,
            )  # fmt: skip
        async_copy.commit_group()
    weight = gl.sum(weights, axis=1) + new_weight
    _store(
        acc, peak, weight, of_token, out_ptr, part_ptr, peak_ptr, weight_ptr, token, tile, kv_head,
        split, per_split >= blocks, stride, parts, q_heads, kv_heads, GATED, SPLITS,
    )  # fmt: skip


def fits(kv: Array, dtype: DTypeLike, *, q_heads: int) -> bool:
    """Whether this kernel supports these heads and pages. Others use the kernels for any sizes."""
    kv_heads, _, page_size, head_dim = kv.shape[2:]
    return (
        kv.dtype == dtype == jnp.bfloat16
        and page_size == _PAGE
        and head_dim in (64, 128, 256)
        and q_heads // kv_heads + 2 <= _ROWS
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
    gated: bool = False,
    target: Target,
) -> tuple[Array, Array]:
    """`attention_inputs`, then `paged_attention` of tiles of one token. Returns its result, and kv.

    Args:
      tables: [tokens, rotated / 2]. RoPE rotates the first `rotated` elements of each head.
      gated: whether qkv has a gate after each query head. The sigmoids of the gates multiply the
        result.
    """
    num_pages, kv_heads, _, _, head_dim = kv.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = (width // head_dim - 2 * kv_heads) // (1 + gated)
    num_tiles = tiles.first.shape[0]
    keys = _block_keys(head_dim)
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
        q_heads=q_heads, kv_heads=kv_heads, HALF=tables[0].shape[-1], GATED=int(gated),
        ROWS=_ROWS, DIM=head_dim, PAGE=_PAGE, KEYS=keys,
        SPLITS=config.splits, MIN_BLOCKS=config.min_blocks, STAGES=config.num_stages,
        WINDOW=window or 0,
    )  # fmt: skip
    out = merged(
        out, sums, tiles, config,
        tile_size=1, keys=keys, window=window, gates=qkv if gated else None, target=target,
    )  # fmt: skip
    return out, jax.freeze(cache)


def _block_keys(head_dim: int) -> int:
    """Keys per block: those of a page, or half of one where two pages would fill a ring."""
    return _PAGE if head_dim <= 128 else _PAGE // 2
