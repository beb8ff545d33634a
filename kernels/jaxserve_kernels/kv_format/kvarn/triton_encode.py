"""Encoding filled pages on a GPU: one program per tile of one head, in a grid of fixed size.

Which tokens of the step fill a page, and how many, is data that the programs read: a step that
fills no page costs an empty launch, and no shape follows the running set.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.codec import (
    KEY_FLOOR,
    KEY_ITERATIONS,
    VALUE_FLOOR,
    VALUE_ITERATIONS,
)
from jaxserve_kernels.kv_format.kvarn.layout import SINK, TAIL, KVarNKV
from jaxserve_kernels.kv_format.kvarn.reference import kept
from jaxserve_kernels.triton_call import triton_call

_PROGRAMS = 264
"""Two for each of an H100's 132 multiprocessors; a tile's matrix leaves no room for more."""


@triton.jit
def _sums(a, a_square, b, b_square):
    return a + b, a_square + b_square


@triton.jit
def _extremes(a_low, a_high, b_low, b_high):
    return tl.minimum(a_low, b_low), tl.maximum(a_high, b_high)


@triton.jit
def _std(x, axis: tl.constexpr, COUNT: tl.constexpr):
    """Sample standard deviation of a matrix over one axis, which is kept; in one pass."""
    total, squares = tl.reduce((x, x * x), axis, _sums, keep_dims=True)
    off = squares - total * (total * (1 / COUNT))
    return tl.sqrt(tl.maximum(off, 0.0) * (1 / (COUNT - 1)))


@triton.jit
def _spread(std):
    """Largest over smallest."""
    return tl.max(std) / tl.maximum(tl.min(std), 1e-8)


@triton.jit
def _times_std(scale, std, LOWEST: tl.constexpr):
    return tl.clamp(scale * tl.clamp(std, 1e-3, 1e3), LOWEST, 22026.465794806718)  # e ** 10


@triton.jit
def _balance(
    x, LOWEST: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Row [ROWS, 1] and column [1, COLUMNS] scales: `codec._scales`, in numbers, not logarithms.

    Dividing a row divides its deviation, so each deviation needs the matrix divided along the
    other axis only.
    """
    row = tl.full([ROWS, 1], 1.0, tl.float32)
    column = tl.full([1, COLUMNS], 1.0, tl.float32)
    column_std = _std(x, 0, ROWS)
    best = _spread(column_std) + _spread(_std(x, 1, COLUMNS))
    best_row = row
    best_column = column
    for _ in tl.static_range(ITERATIONS):
        column = _times_std(column, column_std, LOWEST)
        inverse = 1.0 / column
        plain_std = _std(x * inverse, 1, COLUMNS)
        row = _times_std(row, plain_std / row, LOWEST)
        row_inverse = 1.0 / row
        column_std = _std(x * row_inverse, 0, ROWS) * inverse
        found = _spread(column_std) + _spread(plain_std * row_inverse)
        best_row = tl.where(found <= best, row, best_row)
        best_column = tl.where(found <= best, column, best_column)
        best = tl.minimum(found, best)
    return best_row, best_column


@triton.jit
def _words(
    codes, KEYS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr
):
    """Codes, shifted to their quarter's bits, to words of tokens and of those half a tile later.

    Words of 2-bit codes hold both tokens, and the second result is no other. The sum over quarters
    is one between threads, so both tokens' go together.
    """
    HALF: tl.constexpr = GROUP // 2
    if KEYS:
        pairs = tl.permute(tl.reshape(codes, [4 * QUARTER, 2, HALF]), [0, 2, 1])
    else:
        pairs = tl.permute(tl.reshape(codes, [2, HALF, 4 * QUARTER]), [1, 2, 0])
    low, high = tl.split(pairs)
    both = low | (high << (4 * BITS))
    if KEYS:
        both = tl.sum(tl.reshape(both, [4, QUARTER, HALF]), axis=0)
    else:
        both = tl.sum(tl.reshape(both, [HALF, 4, QUARTER]), axis=1)
    return both.to(tl.int16), (both >> 16).to(tl.int16)


@triton.jit
def _encode_tile(
    fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, words_ptr, scales_ptr,
    last, layer, head, num_pages, num_slots,
    kv_heads: tl.constexpr,
    KEYS: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
    LOWEST: tl.constexpr, ITERATIONS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The keys or values of one head in the page whose last token is number `last`.

    Rows get their own scale and zero, columns a scale: channels are the rows of keys, tokens those
    of values.
    """
    ROWS: tl.constexpr = DIM if KEYS else GROUP
    COLUMNS: tl.constexpr = GROUP if KEYS else DIM
    QUARTER: tl.constexpr = DIM // 4
    KIND: tl.constexpr = 0 if KEYS else 1
    LEVELS: tl.constexpr = (1 << BITS) - 1
    WORD_ROWS: tl.constexpr = GROUP * BITS // 4
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    offset = column if KEYS else row  # token within the tile
    channel = row if KEYS else column
    slot = tl.load(slot_ptr + last)
    start = tl.load(position_ptr + last) - (GROUP - 1)
    tile = ((layer * num_slots + slot).to(tl.int64) * 2 + 1) * kv_heads  # the tail
    kept = raw_ptr + ((tile + head) * 2 + KIND) * (GROUP * DIM) + offset * DIM + channel
    if FRESH:
        source = last - (GROUP - 1) + offset
        maybe = source >= 0
        same = tl.load(slot_ptr + source, mask=maybe, other=-1) == slot
        found = tl.load(position_ptr + source, mask=maybe, other=-1)
        here = maybe & same & (found == start + offset)
        at = fresh_ptr + ((source * kv_heads + head) * 2 + KIND) * DIM + channel
        x = tl.load(at, mask=here, other=0.0) + tl.load(kept, mask=here == 0, other=0.0)
    else:
        x = tl.load(kept)
    x = x.to(tl.float32)
    row_scale, column_scale = _balance(x, LOWEST, ITERATIONS, ROWS, COLUMNS)
    x *= 1.0 / column_scale
    low, high = tl.reduce((x, x), 1, _extremes, keep_dims=True)
    step = tl.maximum((high - low) / row_scale * (1 / LEVELS), 1e-10) * row_scale
    factor = 1.0 / step
    # 1.5 * 2 ** 23 leaves the number, rounded to even, in the lowest bits.
    codes = ((x - low) * factor + 12582912.0).to(tl.int32, bitcast=True) & LEVELS

    page = (layer * num_pages).to(tl.int64) + tl.load(page_ptr + last)
    first, second = _words(codes << (channel // QUARTER * BITS), KEYS, BITS, GROUP, QUARTER)
    token = tl.arange(0, GROUP // 2)
    word = tl.arange(0, QUARTER)
    target = words_ptr + (page * kv_heads + head) * (WORD_ROWS * QUARTER)
    if KEYS:
        target += token[None, :] * QUARTER + word[:, None]
    else:
        target += token[:, None] * QUARTER + word[None, :]
    tl.store(target, first)
    if BITS == 4:
        tl.store(target + GROUP // 2 * QUARTER, second)

    scales = scales_ptr + (page * kv_heads + head) * (3 * (DIM + GROUP))
    row_scales = scales if KEYS else scales + 3 * DIM + GROUP
    column_scales = scales + (3 * DIM if KEYS else 2 * DIM)
    half_type = scales_ptr.dtype.element_ty
    tl.store(row_scales + 2 * row, step.to(half_type))
    tl.store(row_scales + 2 * row + 1, tl.clamp(low, -65504.0, 65504.0).to(half_type))
    half: tl.constexpr = COLUMNS // 2
    place = column % half * 2 + column // half
    tl.store(column_scales + place, column_scale.to(half_type))


@triton.jit
def _encode(
    fresh_ptr, raw_ptr, filling_ptr, count_ptr, slot_ptr, position_ptr, page_ptr,
    key_words_ptr, value_words_ptr, scales_ptr,
    first_layer, num_pages, num_slots,
    layers: tl.constexpr, kv_heads: tl.constexpr,
    VALUE_BITS: tl.constexpr, FRESH: tl.constexpr,
    KEY_LOWEST: tl.constexpr, KEY_ITERATIONS: tl.constexpr,
    VALUE_LOWEST: tl.constexpr, VALUE_ITERATIONS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Programs take tiles in turn: all keys, then all values."""
    tiles = tl.load(count_ptr) * (kv_heads * layers)
    for unit in range(tl.program_id(0), 2 * tiles, tl.num_programs(0)):
        index = unit % tiles
        layer = first_layer + index // kv_heads % layers
        head = index % kv_heads
        last = tl.load(filling_ptr + index // (kv_heads * layers))
        if unit < tiles:
            _encode_tile(
                fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, key_words_ptr, scales_ptr,
                last, layer, head, num_pages, num_slots, kv_heads,
                True, 4, FRESH, KEY_LOWEST, KEY_ITERATIONS, GROUP, DIM,
            )  # fmt: skip
        else:
            _encode_tile(
                fresh_ptr, raw_ptr, slot_ptr, position_ptr, page_ptr, value_words_ptr, scales_ptr,
                last, layer, head, num_pages, num_slots, kv_heads,
                False, VALUE_BITS, FRESH, VALUE_LOWEST, VALUE_ITERATIONS, GROUP, DIM,
            )  # fmt: skip


def encode_filled(
    kv: KVarNKV, first_layer: int, layers: int, fresh: Array | None, step: AttentionStep
) -> KVarNKV:
    """Encode in some layers what the step filled; `fresh` None: the tails hold its tokens too.

    A mixed step writes `raw` in place afterwards. So that XLA knows in which order, whoever only
    reads it takes and returns it as well: a copy of all sinks and tails per layer otherwise.
    """
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    num_tokens = step.positions.shape[0]
    refs = [jax.new_ref(part) for part in (kv.key_words, kv.value_words, kv.scales)]
    raw = kv.raw if fresh is None else jax.new_ref(kv.raw)
    filling, count = _filling(step, min(num_tokens, num_tokens // group + kv.raw.shape[1]), group)
    triton_call(
        kv.raw if fresh is None else fresh, raw, filling, count,
        step.slots, step.positions, step.pages, *refs,
        kernel=_encode,
        name="kvarn_encode",
        out_type=(),
        grid=(min(_PROGRAMS, 2 * filling.shape[0] * kv_heads * layers),),
        num_warps=4,
        num_stages=1,
        first_layer=first_layer, num_pages=num_pages, num_slots=kv.raw.shape[1],
        layers=layers, kv_heads=kv_heads, VALUE_BITS=kv.value_bits, FRESH=fresh is not None,
        KEY_LOWEST=math.exp(KEY_FLOOR), KEY_ITERATIONS=KEY_ITERATIONS,
        VALUE_LOWEST=math.exp(VALUE_FLOOR), VALUE_ITERATIONS=VALUE_ITERATIONS,
        GROUP=group, DIM=4 * quarter,
    )  # fmt: skip
    stores = (jax.freeze(ref) for ref in refs)
    return KVarNKV(*stores, raw if isinstance(raw, Array) else jax.freeze(raw))


def _filling(step: AttentionStep, most: int, group: int) -> tuple[Array, Array]:
    """Which tokens fill a page that is not the first, int32 [most], and how many, int32 [1]."""
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


def keep_raw(kv: KVarNKV, layer: int, fresh: Array, step: AttentionStep) -> KVarNKV:
    """See `reference.keep_raw`."""
    num_slots, _, kv_heads, _, group, head_dim = kv.raw.shape[1:]
    tile = 2 * step.slots + jnp.where(step.positions < group, SINK, TAIL)
    place = jnp.where(kept(step, group), tile * group + step.positions % group, -1)
    raw = jax.new_ref(kv.raw)
    triton_call(
        fresh, place, raw,
        kernel=_keep_raw,
        name="kvarn_keep_raw",
        out_type=(),
        grid=place.shape,
        num_warps=4,
        first_tile=2 * layer * num_slots, kv_heads=kv_heads, GROUP=group, DIM=head_dim,
        ROWS=triton.next_power_of_2(2 * kv_heads),
    )  # fmt: skip
    return kv._replace(raw=jax.freeze(raw))
