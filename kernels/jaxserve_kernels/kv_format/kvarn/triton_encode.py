"""Encodes filled pages on a GPU: one program per tile of one head, in a grid of fixed size.

The list of tokens that fill a page is data, so no shape depends on it. A step that fills no page
costs an empty launch.

In a mixed step each layer waits for its encoder. Between two runs, hundreds of megabytes of weights
pass through the caches and evict the encoder's code, so its code must be short. It loops over parts
of the tile, which stays in the L1 cache, and keeps scales in a small scratch array, from which each
part loads its own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep, limits_of
from jaxserve_kernels.kv_format.kvarn.codec import (
    KEY_FLOOR,
    KEY_ITERATIONS,
    VALUE_FLOOR,
    VALUE_ITERATIONS,
)
from jaxserve_kernels.kv_format.kvarn.layout import SINK, TAIL, KVarNKV
from jaxserve_kernels.kv_format.kvarn.reference import kept
from jaxserve_kernels.kv_format.kvarn.triton_balance import balance, load_part, reduced
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_WARPS = 4
"""More warps wait for each other longer than they work, even with one tile: docs/performance."""

_PART = 32
"""Tokens or channels of a tile per loop iteration."""


@triton.jit
def _write_words(
    fresh_ptr, kept_ptr, old, inverse_ptr, low_ptr, factor_ptr, words_ptr,
    KEYS: tl.constexpr, BITS: tl.constexpr, stride: tl.constexpr, FRESH: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Computes and packs the codes of each word: four quarters of a token, and with 2-bit codes
    also those of the token half a tile later."""
    QUARTER: tl.constexpr = DIM // 4
    WORD_ROWS: tl.constexpr = GROUP * BITS // 4
    ROWS: tl.constexpr = 2 * PART if WORD_ROWS >= 2 * PART else WORD_ROWS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    word = tl.arange(0, QUARTER)[None, :]
    for first in range(0, WORD_ROWS, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        words = tl.zeros([ROWS, QUARTER], tl.int32)
        for place in range(16 // BITS):
            token = row + place // 4 * WORD_ROWS
            channel = place % 4 * QUARTER + word
            x = load_part(fresh_ptr, kept_ptr, old, token, channel, stride, FRESH, DIM)
            x *= tl.load(inverse_ptr + (token if KEYS else channel))
            own = channel if KEYS else token
            x = (x - tl.load(low_ptr + own)) * tl.load(factor_ptr + own)
            # Adding 1.5 * 2 ** 23 leaves the integer, rounded to even, in the lowest bits.
            code = (x + 12582912.0).to(tl.int32, bitcast=True) & LEVELS
            words |= code << (BITS * place)
        tl.store(words_ptr + row * QUARTER + word, words.to(tl.int16))


@triton.jit
def _encode_tile(
    fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, words_ptr, scales_ptr, vectors_ptr,
    last, layer, head, first_page, num_pages, first_slot, num_slots,
    kv_heads: tl.constexpr,
    KEYS: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
    LOWEST: tl.constexpr, ITERATIONS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Encodes the keys or values of one head in the page whose last token has index `last`.

    Each row gets a scale and a zero, each column a scale. Rows are channels of keys or tokens of
    values.
    """
    ROWS: tl.constexpr = DIM if KEYS else GROUP
    COLUMNS: tl.constexpr = GROUP if KEYS else DIM
    SIZE: tl.constexpr = GROUP if GROUP > DIM else DIM
    KIND: tl.constexpr = 0 if KEYS else 1
    LEVELS: tl.constexpr = (1 << BITS) - 1
    stride: tl.constexpr = kv_heads * 2 * DIM
    slot = tl.load(slot_ptr + last)
    tile = (first_slot + layer * num_slots + slot).to(tl.int64) * 2 + 1  # the tail
    kept_ptr = raw_ptr + ((tile * kv_heads + head) * 2 + KIND) * (GROUP * DIM)
    old = 0
    if FRESH:
        offset = tl.arange(0, GROUP)
        source = last - (GROUP - 1) + offset
        maybe = source >= 0
        start = tl.load(position_ptr + last) - (GROUP - 1)
        same = tl.load(slot_ptr + source, mask=maybe, other=-1) == slot
        found = tl.load(position_ptr + source, mask=maybe, other=-1)
        old = tl.sum(tl.where(maybe & same & (found == start + offset), 0, 1))
    first = (last - (GROUP - 1)).to(tl.int64)
    fresh_ptr += first * stride + (head * 2 + KIND) * DIM
    row_ptr = vectors_ptr
    column_ptr = vectors_ptr + SIZE
    out_ptr = vectors_ptr + 2 * SIZE
    row_scale, column_scale = balance(
        fresh_ptr, kept_ptr, old, row_ptr, column_ptr, out_ptr,
        KEYS, LOWEST, ITERATIONS, stride, FRESH, GROUP, DIM, PART,
    )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    tl.store(column_ptr + column, 1.0 / column_scale)
    tl.debug_barrier()
    low, high = reduced(
        fresh_ptr, kept_ptr, old, column_ptr, out_ptr,
        KEYS, True, stride, FRESH, GROUP, DIM, PART,
    )  # fmt: skip
    step = tl.maximum((high - low) / row_scale * (1 / LEVELS), 1e-10) * row_scale
    row = tl.arange(0, ROWS)
    tl.store(row_ptr + row, 1.0 / step)
    tl.debug_barrier()
    page = (first_page + layer * num_pages + tl.load(page_ptr + last)).to(tl.int64)
    page = page * kv_heads + head
    _write_words(
        fresh_ptr, kept_ptr, old, column_ptr, out_ptr, row_ptr,
        words_ptr + page * (GROUP * BITS // 4 * (DIM // 4)),
        KEYS, BITS, stride, FRESH, GROUP, DIM, PART,
    )  # fmt: skip
    scales = scales_ptr + page * (3 * (DIM + GROUP))
    row_scales = scales if KEYS else scales + 3 * DIM + GROUP
    column_scales = scales + (3 * DIM if KEYS else 2 * DIM)
    half_type = scales_ptr.dtype.element_ty
    tl.store(row_scales + 2 * row, step.to(half_type))
    tl.store(row_scales + 2 * row + 1, tl.clamp(low, -65504.0, 65504.0).to(half_type))
    half: tl.constexpr = COLUMNS // 2
    place = column % half * 2 + column // half
    tl.store(column_scales + place, column_scale.to(half_type))
    tl.debug_barrier()  # the next tile's scales overwrite those that are read here


@triton.jit
def _encode(
    fresh_ptr, raw_ptr, filling_ptr, count_ptr, slot_ptr, position_ptr, page_ptr,
    key_words_ptr, value_words_ptr, scales_ptr, vectors_ptr,
    first_page, num_pages, first_slot, num_slots,
    layers: tl.constexpr, kv_heads: tl.constexpr,
    VALUE_BITS: tl.constexpr, FRESH: tl.constexpr,
    KEY_LOWEST: tl.constexpr, KEY_ITERATIONS: tl.constexpr,
    VALUE_LOWEST: tl.constexpr, VALUE_ITERATIONS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Encodes tiles. Programs take them in turn: all keys, then all values."""
    tiles = tl.load(count_ptr) * (kv_heads * layers)
    SIZE: tl.constexpr = GROUP if GROUP > DIM else DIM
    vectors_ptr += tl.program_id(0) * (4 * SIZE)
    for unit in range(tl.program_id(0), 2 * tiles, tl.num_programs(0)):
        index = unit % tiles
        layer = index // kv_heads % layers
        head = index % kv_heads
        last = tl.load(filling_ptr + index // (kv_heads * layers))
        if unit < tiles:
            _encode_tile(
                fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, key_words_ptr, scales_ptr,
                vectors_ptr, last, layer, head, first_page, num_pages, first_slot, num_slots,
                kv_heads, True, 4, FRESH, KEY_LOWEST, KEY_ITERATIONS, GROUP, DIM, PART,
            )  # fmt: skip
        else:
            _encode_tile(
                fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, value_words_ptr, scales_ptr,
                vectors_ptr, last, layer, head, first_page, num_pages, first_slot, num_slots,
                kv_heads, False, VALUE_BITS, FRESH, VALUE_LOWEST, VALUE_ITERATIONS, GROUP, DIM,
                PART,
            )  # fmt: skip


def encode_filled(
    kv: KVarNKV,
    first_layer: int,
    layers: int,
    fresh: Array | None,
    step: AttentionStep,
    *,
    target: Target,
) -> KVarNKV:
    """Encodes the pages that the step filled, in `layers` layers from `first_layer` on.

    fresh are the step's own keys and values; None: they are in the tails already.

    A mixed step updates `raw` in place afterwards. The kernel only reads `raw`, but takes and
    returns it, so that XLA knows the order. Otherwise XLA copies all sinks and tails in each layer.
    """
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    num_tokens = step.positions.shape[0]
    refs = [jax.new_ref(part) for part in (kv.key_words, kv.value_words, kv.scales)]
    raw = kv.raw if fresh is None else jax.new_ref(kv.raw)
    filling, count = _filling(step, min(num_tokens, num_tokens // group + kv.raw.shape[1]), group)
    num_slots, dim = kv.raw.shape[1], 4 * quarter
    programs = min(
        limits_of(target).kvarn_encode_programs * target.gpu.multiprocessors,
        2 * filling.shape[0] * kv_heads * layers,
    )
    triton_call(
        kv.raw if fresh is None else fresh, raw, filling, count,
        step.slots, step.positions, step.pages, *refs,
        kernel=_encode,
        name="kvarn_encode",
        target=target,
        out_type=(jax.ShapeDtypeStruct((programs, 4, max(group, dim)), jnp.float32),),
        grid=(programs,),
        num_warps=_WARPS,
        num_stages=1,
        first_page=first_layer * num_pages, num_pages=num_pages,
        first_slot=first_layer * num_slots, num_slots=num_slots,
        layers=layers, kv_heads=kv_heads, VALUE_BITS=kv.value_bits, FRESH=fresh is not None,
        KEY_LOWEST=math.exp(KEY_FLOOR), KEY_ITERATIONS=KEY_ITERATIONS,
        VALUE_LOWEST=math.exp(VALUE_FLOOR), VALUE_ITERATIONS=VALUE_ITERATIONS,
        GROUP=group, DIM=dim, PART=min(_PART, group, dim),
    )  # fmt: skip
    stores = (jax.freeze(ref) for ref in refs)
    return KVarNKV(*stores, raw if isinstance(raw, Array) else jax.freeze(raw))


def _filling(step: AttentionStep, most: int, group: int) -> tuple[Array, Array]:
    """Indices of the tokens that fill a page other than the first, int32 [most], and their number,
    int32 [1]."""
    fills = ((step.positions + 1) % group == 0) & (step.positions >= group)
    number = jnp.cumsum(fills, dtype=jnp.int32)
    places = jnp.where(fills, number - 1, most)
    tokens = jnp.arange(fills.shape[0], dtype=jnp.int32)
    return jnp.zeros(most, jnp.int32).at[places].set(tokens, mode="drop"), number[-1:]


@triton.jit
def _keep_raw(
    fresh_ptr, place_ptr, raw_ptr, first_tile,
    kv_heads: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    place = tl.load(place_ptr + token)
    if place >= 0:
        row = tl.arange(0, ROWS)[:, None]  # head, keys or values
        valid = row < 2 * kv_heads
        dim = tl.arange(0, DIM)[None, :]
        x = tl.load(fresh_ptr + (token.to(tl.int64) * 2 * kv_heads + row) * DIM + dim, mask=valid)
        tile = (first_tile + place // GROUP).to(tl.int64)
        at = (tile * 2 * kv_heads + row) * GROUP + place % GROUP
        tl.store(raw_ptr + at * DIM + dim, x, mask=valid)


def keep_raw(
    kv: KVarNKV, layer: int, fresh: Array, step: AttentionStep, *, target: Target
) -> KVarNKV:
    """See `reference.keep_raw`."""
    num_slots, _, kv_heads, _, group, head_dim = kv.raw.shape[1:]
    tile = 2 * step.slots + jnp.where(step.positions < group, SINK, TAIL)
    place = jnp.where(kept(step, group), tile * group + step.positions % group, -1)
    raw = jax.new_ref(kv.raw)
    triton_call(
        fresh, place, raw,
        kernel=_keep_raw,
        name="kvarn_keep_raw",
        target=target,
        out_type=(),
        grid=place.shape,
        num_warps=4,
        first_tile=2 * layer * num_slots, kv_heads=kv_heads, GROUP=group, DIM=head_dim,
        ROWS=triton.next_power_of_2(2 * kv_heads),
    )  # fmt: skip
    return kv._replace(raw=jax.freeze(raw))
