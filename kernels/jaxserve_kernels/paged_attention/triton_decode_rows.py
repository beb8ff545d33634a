"""Attention of the decode rows of a mixed step: single tokens beside prompt chunks.

A mixed step has a place for each row that may decode in it, and often few places are taken. If the
decode rows are too few to fill the GPU, free places share their contexts: with 4 tokens there are
16 programs per token and KV head. The number of taken places is known on the device only, so the
device computes the shares, once per step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.paged_attention.config import LOG2_E
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.paged_attention.triton import visit, with_sinks
from jaxserve_kernels.paged_attention.triton_merge import first_block
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_SHARED_PLACES = 64
"""Number of tokens, or shares of tokens, that saturates memory: with 8 KV heads, about four
programs for each multiprocessor of an H100."""

_MOST_SHARES = 16
_MIN_KEYS = 256
"""The least keys of a share: with fewer, merging costs more than sharing gains."""


class Splits(NamedTuple):
    """The blocks that each place visits, int32 [places]. A place with begin == end is idle."""

    first: Array
    """Index of the token within the step."""
    slot: Array
    position: Array
    begin: Array
    """First block of keys, and the one after the last."""
    end: Array


class Parts(NamedTuple):
    """Contexts to merge, int32 [tokens that may be shared]."""

    first: Array
    place: Array
    """The first place that visits the token's context."""
    count: Array
    """Number of places that share it; 0 if one place has visited all of it."""


def split_contexts(
    tiles: QueryTiles, *, keys: int, window: int | None = None
) -> tuple[Splits, Parts]:
    """Divides the contexts of single tokens among the places, in blocks of `keys` keys.

    There are at least _SHARED_PLACES places.
    """

    def before(position: Array) -> Array | int:
        """Number of blocks that are entirely before the window."""
        return 0 if window is None else jnp.maximum(position - window + 1, 0) // keys

    most = tiles.first.shape[0]
    taken = jnp.max(jnp.where(tiles.length > 0, jnp.arange(most, dtype=jnp.int32) + 1, 0))
    shares = jnp.clip(_SHARED_PLACES // jnp.maximum(taken, 1), 1, _MOST_SHARES)
    place = jnp.arange(max(most, _SHARED_PLACES), dtype=jnp.int32)
    tile, index = place // shares, place % shares
    length, first, slot, position = (
        jnp.take(each, tile, mode="clip")
        for each in (tiles.length, tiles.first, tiles.slot, tiles.position)
    )
    least = max(_MIN_KEYS // keys, 1)
    blocks = position // keys + 1
    if window is not None:
        blocks -= before(position)
    blocks = jnp.where((tile < taken) & (length > 0), blocks, 0)
    size = jnp.maximum(-(-blocks // shares), least)
    begin = jnp.minimum(index * size, blocks)
    end = jnp.minimum(begin + size, blocks)
    if window is not None:
        begin, end = begin + before(position), end + before(position)

    own = slice(0, min(most, _SHARED_PLACES // 2))  # with more tokens, each has one share
    blocks = tiles.position[own] // keys + 1
    if window is not None:
        blocks -= before(tiles.position[own])
    blocks = jnp.where(tiles.length[own] > 0, blocks, 0)
    size = jnp.maximum(-(-blocks // shares), least)
    count = jnp.where(size < blocks, -(-blocks // size), 0)
    parts = Parts(tiles.first[own], place[own] * shares, count)
    return Splits(first, slot, position, begin, end), parts


@triton.jit
def _attend(
    q_ptr, kv_ptr, first_page, table_ptr, first_ptr, slot_ptr, position_ptr, begin_ptr, end_ptr,
    sinks_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr,
    table_stride: tl.constexpr, scale: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
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
        dim = tl.arange(0, DIM)
        valid = row < group
        q_row = first * q_heads + kv_head * group + row
        q = tl.load(q_ptr + q_row[:, None] * DIM + dim[None, :], mask=valid[:, None], other=0.0)
        position = last + tl.zeros([ROWS], tl.int32)
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        is_first = begin == first_block(last, KEYS, WINDOW)
        head = kv_head * group + row
        peak, weight = with_sinks(peak, weight, sinks_ptr, head, valid & is_first)
        for block in tl.range(begin, end, num_stages=STAGES):
            peak, weight, acc = visit(
                block, q, peak, weight, acc, kv_ptr, table, table_stride, first_page, kv_head,
                position, scale, kv_heads, DIM, PAGE, KEYS, True, WINDOW,
            )  # fmt: skip
        if (begin == first_block(last, KEYS, WINDOW)) & (end > last // KEYS):
            out = out_ptr + q_row[:, None] * DIM + dim[None, :]
            tl.store(out, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])
        else:
            part = (place * kv_heads + kv_head) * ROWS + row
            tl.store(part_ptr + part[:, None] * DIM + dim[None, :], acc, mask=valid[:, None])
            tl.store(peak_ptr + part, peak, mask=valid)
            tl.store(weight_ptr + part, weight, mask=valid)


@triton.jit
def _merge(
    part_ptr, peak_ptr, weight_ptr, first_ptr, place_ptr, count_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one token's query heads that share a KV head."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = q_heads // kv_heads
    count = tl.load(count_ptr + token)
    if count > 0:
        share = tl.arange(0, MOST)
        row = tl.arange(0, GROUP)
        dim = tl.arange(0, DIM)
        there = (share < count)[:, None] & (row < group)[None, :]
        part = ((tl.load(place_ptr + token) + share) * kv_heads + kv_head) * ROWS
        part = part[:, None] + row[None, :]
        peaks = tl.load(peak_ptr + part, mask=there, other=-1.0e30)
        shrink = tl.exp2(peaks - tl.max(peaks, axis=0)[None, :])
        weights = tl.load(weight_ptr + part, mask=there, other=0.0)
        acc = part_ptr + part[:, :, None] * DIM + dim[None, None, :]
        acc = tl.load(acc, mask=there[:, :, None], other=0.0)
        out = tl.sum(acc * shrink[:, :, None], axis=0)
        out = out / tl.maximum(tl.sum(weights * shrink, axis=0), 1.0e-30)[:, None]
        q_row = tl.load(first_ptr + token).to(tl.int64) * q_heads + kv_head * group + row
        target = out_ptr + q_row[:, None] * DIM + dim[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(row < group)[:, None])


def _block_keys(kv: Array) -> int:
    """Keys per block. Two pages of 64 give 3 % more bandwidth than one. In float32 they would not
    fit the shared memory of every GPU."""
    return max(kv.shape[4], 128 if kv.dtype.itemsize <= 2 else 64)


def attend(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    out: jax.Ref,
    *,
    window: int | None = None,
    sinks: Array | None = None,
    target: Target,
) -> None:
    """`reference.paged_attention` of tiles of at most one token. Stores their rows of `out`
    [tokens, q_heads, head_dim], which also holds the results of other tiles."""
    num_pages, kv_heads, _, page_size, head_dim = kv.shape[1:]
    q_heads = q.shape[1]
    rows = max(16, triton.next_power_of_2(q_heads // kv_heads))
    keys = _block_keys(kv)
    splits, parts = split_contexts(tiles, keys=keys, window=window)
    written = triton_call(
        q, kv, layer * num_pages, page_table, *splits, sinks, out,
        kernel=_attend,
        name="paged_attention_decode_rows",
        target=target,
        out_type=part_types(kv_heads, rows, head_dim),
        grid=(splits.first.shape[0], kv_heads),
        num_warps=4,
        table_stride=page_table.shape[1], scale=head_dim**-0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=rows, DIM=head_dim,
        PAGE=page_size, KEYS=keys, STAGES=3, WINDOW=window or 0,
    )  # fmt: skip
    merge(written, parts, out, target=target)


def part_types(kv_heads: int, rows: int, head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the arrays between shares and `merge`: sums, peaks and weights."""
    statistics = jax.ShapeDtypeStruct((_SHARED_PLACES, kv_heads, rows), jnp.float32)
    return jax.ShapeDtypeStruct((*statistics.shape, head_dim), jnp.float32), statistics, statistics


def merge(
    written: tuple[Array, Array, Array], parts: Parts, out: jax.Ref, *, target: Target
) -> None:
    """Merges the shares' sums, peaks and weights (`part_types`), and stores the results in
    `out`."""
    _, kv_heads, rows, head_dim = written[0].shape
    tokens, q_heads = parts.first.shape[0], out.shape[1]
    triton_call(
        *written, *parts, out,
        kernel=_merge,
        name="paged_attention_decode_rows_merge",
        target=target,
        out_type=(),
        grid=(tokens, kv_heads),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=rows, DIM=head_dim,
        GROUP=triton.next_power_of_2(q_heads // kv_heads), MOST=_MOST_SHARES,
    )  # fmt: skip
