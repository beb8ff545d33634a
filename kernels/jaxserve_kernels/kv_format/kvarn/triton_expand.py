"""Expands the pages that a step's chunks see, and attends to them.

A query sees its own page in full precision and earlier pages decoded. So a page inside the chunk
has two places in the scratch, and each query tile, cut at page ends, has its own page table. Keys
stay rotated, like the queries. Values are rotated back once per page, so that results need not be
rotated once per query.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format import chunks
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV, chunk_pages
from jaxserve_kernels.kv_format.kvarn.triton_inputs import signs
from jaxserve_kernels.paged_attention import paged_attention
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_PAGE = 64
"""The most tokens in a page of the scratch: attention is fastest with this size."""


@triton.jit
def _store_values(target, v0, v1, v2, v3, QUARTER: tl.constexpr):
    """Rotates values back and stores them, from quarters [tokens, quarter]."""
    dtype: tl.constexpr = target.dtype.element_ty
    matrix = signs(QUARTER, dtype)
    v0 = tl.dot(v0.to(dtype), matrix, input_precision="ieee")
    v1 = tl.dot(v1.to(dtype), matrix, input_precision="ieee")
    v2 = tl.dot(v2.to(dtype), matrix, input_precision="ieee")
    v3 = tl.dot(v3.to(dtype), matrix, input_precision="ieee")
    norm: tl.constexpr = (4 * QUARTER) ** -0.5
    a = (v0 + v1) * norm
    b = (v0 - v1) * norm
    c = (v2 + v3) * norm
    d = (v2 - v3) * norm
    tl.store(target, (a + c).to(dtype))
    tl.store(target + QUARTER, (b + d).to(dtype))
    tl.store(target + 2 * QUARTER, (a - c).to(dtype))
    tl.store(target + 3 * QUARTER, (b - d).to(dtype))


@triton.jit
def _value_quarter(
    words, scale, zero, scales, number: tl.constexpr, BITS: tl.constexpr, QUARTER: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Decodes a quarter of some tokens' values: (code * scale + zero) * column."""
    code = ((words >> (BITS * number)) & ((1 << BITS) - 1)).to(tl.float32)
    dim = tl.arange(0, QUARTER)[None, :]
    column = tl.load(scales + 2 * DIM + 2 * (number % 2 * QUARTER + dim) + number // 2)
    return (code * scale + zero) * column.to(tl.float32)


@triton.jit
def _decode(
    key_words_ptr, value_words_ptr, scales_ptr, out, tile, offset, row,
    GROUP: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Decodes keys and values of the tokens `offset` of a tile: (code * scale + zero) * column."""
    DIM: tl.constexpr = 4 * QUARTER
    WORD_ROWS: tl.constexpr = GROUP * BITS // 4
    dtype: tl.constexpr = out.dtype.element_ty
    dim = tl.arange(0, QUARTER)[None, :]
    target = out + row[:, None] * DIM + dim
    scales = scales_ptr + tile * (3 * (DIM + GROUP))
    words = tl.load(key_words_ptr + tile * (GROUP * QUARTER) + offset[:, None] * QUARTER + dim)
    words = words.to(tl.int32)
    place = offset % (GROUP // 2) * 2 + offset // (GROUP // 2)
    column = tl.load(scales + 3 * DIM + place[:, None]).to(tl.float32)
    for quarter in tl.static_range(4):
        code = ((words >> (4 * quarter)) & 15).to(tl.float32)
        channel = scales + 2 * (quarter * QUARTER + dim)
        scale = tl.load(channel).to(tl.float32)
        zero = tl.load(channel + 1).to(tl.float32)
        tl.store(target + quarter * QUARTER, ((code * scale + zero) * column).to(dtype))
    at = value_words_ptr + tile * (WORD_ROWS * QUARTER)
    words = tl.load(at + (offset % WORD_ROWS)[:, None] * QUARTER + dim).to(tl.int32)
    words = words >> (offset // WORD_ROWS * 8)[:, None]  # words of 2-bit codes hold two tokens
    token = scales + 3 * DIM + GROUP + 2 * offset[:, None]
    scale = tl.load(token).to(tl.float32)
    zero = tl.load(token + 1).to(tl.float32)
    v0 = _value_quarter(words, scale, zero, scales, 0, BITS, QUARTER, DIM)
    v1 = _value_quarter(words, scale, zero, scales, 1, BITS, QUARTER, DIM)
    v2 = _value_quarter(words, scale, zero, scales, 2, BITS, QUARTER, DIM)
    v3 = _value_quarter(words, scale, zero, scales, 3, BITS, QUARTER, DIM)
    _store_values(target + PAGE * DIM, v0, v1, v2, v3, QUARTER)


@triton.jit
def _raw(fresh, kept, here, QUARTER: tl.constexpr):
    """Loads a quarter of some tokens' keys or values in full precision: the step's own, or those in
    sink or tail."""
    dim = tl.arange(0, QUARTER)[None, :]
    return tl.load(tl.where(here[:, None], fresh, kept) + dim)


@triton.jit
def _expand(
    key_words_ptr, value_words_ptr, scales_ptr, raw_ptr, fresh_ptr,
    slot_ptr, index_ptr, page_ptr, taken_ptr, start_ptr, end_ptr, shift_ptr, out_ptr,
    first_page, first_slot,
    kv_heads: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Expands PAGE tokens of one head in place after place. `page_ptr`: the page whose codes to
    decode, -1 for full precision."""
    kv_head = tl.program_id(1)
    DIM: tl.constexpr = 4 * QUARTER
    PARTS: tl.constexpr = GROUP // PAGE
    row = tl.arange(0, PAGE)
    for unit in range(tl.program_id(0), tl.load(taken_ptr) * PARTS, tl.num_programs(0)):
        place = unit // PARTS
        page = tl.load(page_ptr + place)
        offset = unit % PARTS * PAGE + row
        out = out_ptr + (unit * kv_heads + kv_head).to(tl.int64) * (2 * PAGE * DIM)
        if page >= 0:
            _decode(
                key_words_ptr, value_words_ptr, scales_ptr, out,
                (first_page + page).to(tl.int64) * kv_heads + kv_head, offset, row,
                GROUP, QUARTER, BITS, PAGE,
            )  # fmt: skip
        else:
            slot = tl.load(slot_ptr + place)
            index = tl.load(index_ptr + place)
            position = index * GROUP + offset
            here = (position >= tl.load(start_ptr + slot)) & (position < tl.load(end_ptr + slot))
            token = (position + tl.load(shift_ptr + slot)).to(tl.int64)
            tile = (first_slot + slot).to(tl.int64) * 2 + tl.where(index > 0, 1, 0)
            kept = raw_ptr + ((tile * kv_heads + kv_head) * (2 * GROUP) + offset)[:, None] * DIM
            fresh = fresh_ptr + ((token * kv_heads + kv_head) * 2)[:, None] * DIM
            target = out + row[:, None] * DIM + tl.arange(0, QUARTER)[None, :]
            for quarter in tl.static_range(4):
                key = _raw(fresh + quarter * QUARTER, kept + quarter * QUARTER, here, QUARTER)
                tl.store(target + quarter * QUARTER, key)
            fresh += DIM
            kept += GROUP * DIM
            v0 = _raw(fresh, kept, here, QUARTER)
            v1 = _raw(fresh + QUARTER, kept + QUARTER, here, QUARTER)
            v2 = _raw(fresh + 2 * QUARTER, kept + 2 * QUARTER, here, QUARTER)
            v3 = _raw(fresh + 3 * QUARTER, kept + 3 * QUARTER, here, QUARTER)
            _store_values(target + PAGE * DIM, v0, v1, v2, v3, QUARTER)


def attend(
    q: Array,
    kv: KVarNKV,
    layer: int,
    fresh: Array,
    step: AttentionStep,
    *,
    tile_size: int,
    target: Target,
) -> tuple[Array, KVarNKV]:
    """Attention of the chunks' tiles. Returns the result and kv: see `encode_filled`.

    Args:
      q: rotated queries [tokens, q_heads, head_dim].
      fresh: the step's rotated keys and values [tokens, kv_heads, 2, head_dim].
    """
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    slots, width = step.page_table.shape
    page_size = min(_PAGE, group)
    each = chunks.of_tiles(step.tiles, slots)
    coded = jnp.maximum((each.end - 1) // group, 0)  # pages to decode, or the sink
    # The sink already has a place in full precision, unless it is the only page.
    first_raw = jnp.maximum(each.start // group, jnp.minimum(coded, 1))
    raw = jnp.where(each.end > 0, coded + 1 - first_raw, 0)
    most = chunks.capacity(width * group) // group + chunk_pages(q.shape[0], slots, group)
    places = chunks.divide(coded + raw, most)
    page, index = _contents(places, coded, first_raw, step)
    count = places.slot.shape[0]
    parts = group // page_size
    raw_ref = jax.new_ref(kv.raw)
    expanded = triton_call(
        kv.key_words, kv.value_words, kv.scales, raw_ref, fresh,
        places.slot, index, page, places.taken, *each,
        kernel=_expand,
        name="expand_kvarn",
        target=target,
        out_type=jax.ShapeDtypeStruct(
            (1, count * parts, kv_heads, 2, page_size, 4 * quarter), q.dtype
        ),
        grid=(min(count * parts, chunks.programs(kv_heads, target=target)), kv_heads),
        num_warps=4,
        first_page=layer * num_pages, first_slot=layer * kv.raw.shape[1],
        kv_heads=kv_heads, GROUP=group, QUARTER=quarter, BITS=kv.value_bits, PAGE=page_size,
    )  # fmt: skip
    tiles = chunks.cut_at_pages(step.tiles, group)
    own = (tiles.position // group)[:, None]
    number = jnp.arange(width, dtype=jnp.int32)[None, :]
    at = places.first[tiles.slot][:, None]
    raw_at = at + (coded - first_raw)[tiles.slot][:, None] + own
    takes_raw = (number == own) & (own >= first_raw[tiles.slot][:, None])
    table = jnp.clip(jnp.where(takes_raw, raw_at, at + number), 0, count - 1)
    table = parts * table[:, :, None] + jnp.arange(parts, dtype=jnp.int32)
    tiles = tiles._replace(slot=jnp.arange(tiles.slot.shape[0], dtype=jnp.int32))
    table = table.reshape(-1, parts * width)
    result = paged_attention(q, expanded, 0, table, tiles, tile_size=tile_size, target=target)
    return result, kv._replace(raw=jax.freeze(raw_ref))


def _contents(
    places: chunks.Places, coded: Array, first_raw: Array, step: AttentionStep
) -> tuple[Array, Array]:
    """The page whose codes each place decodes, -1 for full precision; and the page's index in its
    sequence."""
    slot = places.slot
    as_codes = places.number < coded[slot]
    index = jnp.where(as_codes, places.number, places.number - (coded - first_raw)[slot])
    page = step.page_table.at[slot, index].get(mode="clip")
    page = jnp.where(as_codes & (index > 0), page, -1)  # the first is the sink
    return page, index
