"""Attention of a decode step's tokens over a KVarN cache, from the projection's partial sums.

A program takes one token, KV head and part of the context, as in `triton_attention`. It also
computes the token's query, key and value itself, which saves a kernel. It copies keys and values of
earlier steps into a ring while the projection still runs. The part that contains the token's
position visits the new key first, and writes the key and the value into the sink or the tail.

Gluon gives each warp its own softmax and sums over a quarter of the keys. Within a page warps wait
for each other only to share the scaled queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format.base import AttentionStep, limits_of
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_attention import part_types
from jaxserve_kernels.kv_format.kvarn.triton_heads import rotated, store_heads
from jaxserve_kernels.kv_format.kvarn.triton_merge import merge
from jaxserve_kernels.kv_format.kvarn.triton_ring import TILES, copy_unit, units_of
from jaxserve_kernels.kv_format.kvarn.triton_streaming_softmax import of_all_warps, own_key
from jaxserve_kernels.kv_format.kvarn.triton_visits import stacked, visit_codes, visit_raw
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.paged_attention.triton_heads import token_heads
from jaxserve_kernels.paged_attention.triton_visits import MASKED, for_each_warp
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_ROWS = 8
"""Columns of products: the queries that share a KV head, its key and its value, and padding."""

_MIN_UNITS = 3
"""The least units per program, if the context has them: with fewer, merging costs more."""

_MOST_SPLITS = 64

_MERGED_BY_A_WARP = 8
"""Up to this many parts are merged by one warp, more by four."""

_GROUP = 128
_QUARTER = 32
"""The sizes of pages and heads that this kernel supports."""

_CHUNK = 64
"""Keys in full precision per unit."""


@gluon.jit
def _copy(
    index, stage, page, rings, arrays, where, kv_heads: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Copies a unit of the context into a stage of the rings."""
    ring, scales_ring = rings
    key_words_ptr, value_words_ptr, scales_ptr, raw_ptr = arrays
    first_tile, own_tile, sink_units, raw_units, offset, kv_head = where
    copy_unit(
        index, stage, page, ring, scales_ring, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
        first_tile, own_tile, sink_units, raw_units, offset, kv_head,
        kv_heads, scales_ring.shape[2], ring.shape[3], BITS, ring.shape[2],
    )  # fmt: skip


@gluon.jit
def _page_of(index, first_page, table, own, raw_units):
    """The page of a unit of codes. `own`: the index in `table` of the token's own page. For units
    in full precision, and after the last unit, any page."""
    number = gl.minimum(gl.maximum(index - raw_units + 1, 0), own)
    return first_page + gl.load(table + number)


@gluon.jit
def _fill(
    begin, stop, first_page, table, own, rings, arrays, where, kv_heads: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """Copies the first units into the rings, all in flight at once."""
    STAGES: gl.constexpr = rings[0].shape[0]
    raw_units = where[3]
    pages = ()
    for stage in gl.static_range(STAGES):
        page = _page_of(begin + stage, first_page, table, own, raw_units)
        pages = pages + (page,)  # noqa: RUF005  (Triton knows no other way)
    for stage in gl.static_range(STAGES):
        if begin + stage < stop:
            _copy(begin + stage, stage, pages[stage], rings, arrays, where, kv_heads, BITS)
        async_copy.commit_group()


@gluon.jit
def _for_warps(heads_mem, sums: gl.constexpr):
    """Quarters of heads in shared memory [4, rows, quarter] as operands of every warp."""
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    q0 = for_each_warp(heads_mem.index(0), right)
    q1 = for_each_warp(heads_mem.index(1), right)
    q2 = for_each_warp(heads_mem.index(2), right)
    q3 = for_each_warp(heads_mem.index(3), right)
    return q0, q1, q2, q3


@gluon.jit
def _first(
    y, heads_mem, owner, raw_ptr, where, scale: gl.constexpr, group: gl.constexpr,
    kv_heads: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """The softmax of each warp before the first unit. The `owner` of the token's key and value
    visits them, and writes them to the sink or the tail."""
    y0, y1, y2, y3 = y
    _, own_tile, _, _, offset, kv_head = where
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = y0.shape[0]
    QUARTER: gl.constexpr = y0.shape[1]
    peak = gl.full([WARPS, ROWS], MASKED, gl.float32, gl.SliceLayout(1, sums))
    weights = gl.zeros([WARPS, KEYS, ROWS], gl.float32, sums)
    acc0 = gl.zeros([WARPS, QUARTER, ROWS], gl.float32, sums)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, y0.type.layout)), 1)
    if owner:
        target = raw_ptr + ((own_tile * kv_heads + kv_head) * 2 * GROUP + offset) * (4 * QUARTER)
        target += gl.where(row == group, 0, GROUP * (4 * QUARTER))
        store_heads(target, y0, y1, y2, y3, (row == group) | (row == group + 1))
        peak, weights, acc0, acc1, acc2, acc3 = own_key(
            y0, y1, y2, y3, heads_mem, peak, weights, acc0, acc1, acc2, acc3, scale, group
        )  # fmt: skip
    return peak, weights, acc0, acc1, acc2, acc3


@gluon.jit
def _visit_units(
    q, y, softmax, buffers, begin, stop, first_page, table, own, rings, arrays, where,
    scale: gl.constexpr, kv_heads: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Visits the units from `begin` to `stop`. The next ones are copied meanwhile."""
    STAGES: gl.constexpr = rings[0].shape[0]
    CHUNK: gl.constexpr = rings[0].shape[2]
    QUARTER: gl.constexpr = rings[0].shape[3]
    q0, q1, q2, q3 = q
    y0, y1, y2, y3 = y
    peak, weights, acc0, acc1, acc2, acc3 = softmax
    tiles, scales, key_scales, heads, heads_mem = buffers
    _, _, sink_units, raw_units, offset, _ = where
    for index in range(begin, stop):
        place = (index - begin) % STAGES
        page = _page_of(index + STAGES, first_page, table, own, raw_units)
        async_copy.wait_group(STAGES - 1)
        gl.barrier()
        if index < raw_units:
            in_own = index >= sink_units
            held = gl.where(in_own, offset - (index - sink_units) * CHUNK, CHUNK)
            peak, weights, acc0, acc1, acc2, acc3 = visit_raw(
                tiles, place * TILES, held, q0, q1, q2, q3,
                peak, weights, acc0, acc1, acc2, acc3, scale,
            )  # fmt: skip
        else:
            peak, weights, acc0, acc1, acc2, acc3 = visit_codes(
                tiles, place * TILES, scales, key_scales, place * 4, y0, y1, y2, y3,
                heads, heads_mem, peak, weights, acc0, acc1, acc2, acc3, scale, QUARTER, BITS,
            )  # fmt: skip
        if index + STAGES < stop:
            gl.barrier()
            _copy(index + STAGES, place, page, rings, arrays, where, kv_heads, BITS)
        async_copy.commit_group()
    return peak, weights, acc0, acc1, acc2, acc3


@gluon.jit
def _store(out_ptr, first, found, row, group: gl.constexpr):
    """Stores the attention's results of the queries, heads from `first` on."""
    x0, x1, x2, x3, _, weight = found
    DIM: gl.constexpr = 4 * x0.shape[1]
    share = gl.expand_dims(1.0 / weight, 1)
    x0, x1, x2, x3 = rotated(x0 * share, x1 * share, x2 * share, x3 * share)
    store_heads(out_ptr + (first + row) * DIM, x0, x1, x2, x3, row < group)


@gluon.jit
def _store_part(sums_ptr, peak_ptr, weight_ptr, part, found, row, group: gl.constexpr):
    """Stores the sums of one of several splits, from row `part` on."""
    x0, x1, x2, x3, top, weight = found
    ROWS: gl.constexpr = x0.shape[0]
    DIM: gl.constexpr = 4 * x0.shape[1]
    store_heads(sums_ptr + (part + row) * DIM, x0, x1, x2, x3, row < group)
    query = gl.arange(0, ROWS, gl.SliceLayout(1, x0.type.layout))
    gl.store(peak_ptr + part + query, top, mask=query < group)
    gl.store(weight_ptr + part + query, weight, mask=query < group)


@gluon.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr,
    key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    out_ptr, sums_ptr, peak_ptr, weight_ptr,
    first_page, first_slot, table_stride,
    stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr, scale: gl.constexpr,
    q_heads: gl.constexpr, kv_heads: gl.constexpr,
    ROWS: gl.constexpr, QUARTER: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
    CHUNK: gl.constexpr, SPLITS: gl.constexpr, MIN_UNITS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """One program per tile, KV head and part."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = CHUNK // WARPS
    group: gl.constexpr = q_heads // kv_heads
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    tile = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    length = gl.load(length_ptr + tile)
    position = gl.load(position_ptr + tile)
    slot = gl.load(slot_ptr + tile).to(gl.int64)
    token = gl.load(first_ptr + tile).to(gl.int64)
    own = position // GROUP
    offset = position % GROUP
    sink_units, raw_units, units = units_of(position, GROUP, CHUNK)
    per_split = gl.maximum((units + SPLITS - 1) // SPLITS, MIN_UNITS)
    begin = split * per_split
    stop = gl.minimum(begin + per_split, units)
    owner = (begin < raw_units) & (raw_units <= stop)
    if EARLY:
        gdc_launch_dependents()
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
        return
    if begin >= stop:
        return

    # Each buffer has two views: one for copies into it, and one for reads.
    ring = gl.allocate_shared_memory(gl.int16, [STAGES, TILES, CHUNK, QUARTER], spread)
    tiles = ring.reinterpret(gl.int16, [STAGES * TILES, WARPS, KEYS, QUARTER], spread)
    scales_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 4, GROUP], plain)
    scales = scales_ring.reinterpret(gl.int32, [STAGES * 4, GROUP], vector)
    key_scales = scales_ring.reinterpret(gl.int32, [STAGES * 8, WARPS, KEYS], plain)
    heads_mem = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, QUARTER], plain)
    heads = heads_mem.reinterpret(gl.bfloat16, [4, ROWS, QUARTER], plain_3)
    table = table_ptr + slot * table_stride
    first_tile = (first_slot + slot) * 2
    own_tile = first_tile + gl.where(own > 0, 1, 0)
    rings = ring, scales_ring
    arrays = key_words_ptr, value_words_ptr, scales_ptr, raw_ptr
    where = first_tile, own_tile, sink_units, raw_units, offset, kv_head
    _fill(begin, stop, first_page, table, own, rings, arrays, where, kv_heads, BITS)

    y0, y1, y2, y3 = token_heads(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, kv_head,
        stride, parts, q_heads, kv_heads, eps, ROWS, QUARTER, 4, flat, EARLY,
    )  # fmt: skip
    y0, y1, y2, y3 = rotated(y0, y1, y2, y3)
    heads.store(stacked(y0, y1, y2, y3))
    q = _for_warps(heads_mem, sums)
    y = y0, y1, y2, y3
    softmax = _first(y, heads_mem, owner, raw_ptr, where, scale, group, kv_heads, GROUP, KEYS, sums)
    buffers = tiles, scales, key_scales, heads, heads_mem
    softmax = _visit_units(
        q, y, softmax, buffers, begin, stop, first_page, table, own, rings, arrays, where,
        scale, kv_heads, BITS,
    )  # fmt: skip
    found = of_all_warps(ring, *softmax, flat)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, flat)), 1)
    if SPLITS == 1:
        _store(out_ptr, token * q_heads + kv_head * group, found, row, group)
    else:
        part = ((tile * kv_heads + kv_head) * SPLITS + split).to(gl.int64) * ROWS
        _store_part(sums_ptr, peak_ptr, weight_ptr, part, found, row, group)


def fits(qkv: Array, kv: KVarNKV, dtype: DTypeLike) -> bool:
    """Whether this kernel supports these heads and pages. Others use `triton_attention`."""
    _, _, kv_heads, group, quarter = kv.key_words.shape
    heads = qkv.shape[2] // (4 * quarter * kv_heads)  # with a key's and a value's
    return dtype == jnp.bfloat16 and (group, quarter) == (_GROUP, _QUARTER) and heads <= _ROWS


def heuristic(*, tiles: int, kv_heads: int, target: Target) -> Config:
    """A configuration for `tiles` single tokens. The context of a lone token is split further."""
    wanted = (
        limits_of(target).kvarn_streaming_programs
        * target.gpu.multiprocessors
        // (tiles * kv_heads)
        if tiles > 1
        else _MOST_SPLITS
    )
    splits = max(1, min(wanted, _MOST_SPLITS))
    return Config(splits=splits, num_warps=4, num_stages=2, min_blocks=_MIN_UNITS)


def attend(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    config: Config,
    *,
    eps: float,
    target: Target,
) -> tuple[Array, KVarNKV]:
    """`kv_format.attend` of single tokens. Returns the result, and kv with their keys and
    values."""
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    parts, tokens, width = qkv.shape
    head_dim, tiles = 4 * quarter, step.tiles.in_one_list()
    q_heads, num_tiles = width // head_dim - 2 * kv_heads, tiles.first.shape[0]
    grid = (num_tiles, kv_heads, config.splits)
    whole = jax.ShapeDtypeStruct((tokens, q_heads, head_dim), jnp.bfloat16)
    shared = {
        "q_heads": q_heads, "kv_heads": kv_heads, "ROWS": _ROWS, "QUARTER": quarter,
        "GROUP": group, "CHUNK": _CHUNK, "SPLITS": config.splits, "MIN_UNITS": config.min_blocks,
    }  # fmt: skip
    raw = jax.new_ref(kv.raw)
    out, *found = triton_call(
        qkv, *heads.of_inputs, *tables, kv.key_words, kv.value_words, kv.scales, raw,
        step.page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_kvarn_inputs",
        target=target,
        out_type=(whole, *part_types((*grid, _ROWS) if config.splits > 1 else (1,), head_dim)),
        grid=grid,
        num_warps=config.num_warps, STAGES=config.num_stages,
        first_page=layer * num_pages, first_slot=layer * kv.raw.shape[1],
        table_stride=step.page_table.shape[1], stride=tokens * width, parts=parts, eps=eps,
        scale=head_dim**-0.5 * LOG2_E, BITS=kv.value_bits, **shared,
    )  # fmt: skip
    if config.splits > 1:
        alone = config.splits > _MERGED_BY_A_WARP
        out = triton_call(
            *found, tiles.first, tiles.length, tiles.position,
            kernel=merge,
            name="paged_attention_kvarn_inputs_merge",
            target=target,
            out_type=whole,
            grid=(num_tiles, q_heads if alone else kv_heads),
            num_warps=4,
            HEADS=1 if alone else max(4, triton.next_power_of_2(q_heads // kv_heads)),
            WIDTH=triton.next_power_of_2(config.splits if alone else min(config.splits, 8)),
            **shared,
        )  # fmt: skip
    return out, kv._replace(raw=jax.freeze(raw))
