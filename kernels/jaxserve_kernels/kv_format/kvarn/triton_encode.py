"""Encoding filled pages on a GPU: one program per tile of one head, in a grid of fixed size.

Which tokens of the step fill a page, and how many, is data that the programs read: a step that
fills no page costs an empty launch, and no shape follows the running set.
"""

from __future__ import annotations

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
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.triton_parts import round_even
from jaxserve_kernels.triton_call import triton_call

_PROGRAMS = 264
"""Two for each of an H100's 132 multiprocessors; a tile's matrix leaves no room for more."""


@triton.jit
def _std(x, axis: tl.constexpr, COUNT: tl.constexpr):
    """Sample standard deviation of a matrix over one axis, which is kept."""
    mean = tl.sum(x, axis=axis, keep_dims=True) / COUNT
    off = x - mean
    return tl.sqrt(tl.sum(off * off, axis=axis, keep_dims=True) / (COUNT - 1))


@triton.jit
def _log_std(std):
    return tl.log(tl.clamp(std, 1e-3, 1e3))


@triton.jit
def _spread(std):
    """Largest over smallest."""
    return tl.max(std) / tl.maximum(tl.min(std), 1e-8)


@triton.jit
def _balance(
    x, FLOOR: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Logarithms of the row [ROWS, 1] and column [1, COLUMNS] scales: `codec._scales`."""
    log_row = tl.zeros([ROWS, 1], tl.float32)
    log_column = tl.zeros([1, COLUMNS], tl.float32)
    column_std = _std(x, 0, ROWS)
    best = _spread(column_std) + _spread(_std(x, 1, COLUMNS))
    best_row = log_row
    best_column = log_column
    for _ in tl.static_range(ITERATIONS):
        log_column = tl.clamp(log_column + _log_std(column_std), FLOOR, 10.0)
        row_std = _std(x * tl.exp(-log_column - log_row), 1, COLUMNS)
        before = log_row
        log_row = tl.clamp(log_row + _log_std(row_std), FLOOR, 10.0)
        # Dividing a row divides its deviation: no need to look at the matrix again.
        row_std *= tl.exp(before - log_row)
        column_std = _std(x * tl.exp(-log_column - log_row), 0, ROWS)
        found = _spread(column_std) + _spread(row_std)
        best_row = tl.where(found <= best, log_row, best_row)
        best_column = tl.where(found <= best, log_column, best_column)
        best = tl.minimum(found, best)
    return best_row, best_column


@triton.jit
def _encode(
    fresh_ptr, raw_ptr, filling_ptr, count_ptr, slot_ptr, position_ptr, page_ptr,
    words_ptr, scales_ptr,
    first_layer, num_pages, num_slots,
    layers: tl.constexpr, kv_heads: tl.constexpr,
    KEYS: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
    FLOOR: tl.constexpr, ITERATIONS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # Rows get their own scale and zero, columns a scale: channels are the rows of keys, tokens
    # those of values.
    ROWS: tl.constexpr = DIM if KEYS else GROUP
    COLUMNS: tl.constexpr = GROUP if KEYS else DIM
    QUARTER: tl.constexpr = DIM // 4
    KIND: tl.constexpr = 0 if KEYS else 1
    LEVELS: tl.constexpr = (1 << BITS) - 1
    HALVES: tl.constexpr = 4 // BITS
    VALUE_ROWS: tl.constexpr = GROUP // HALVES
    units = tl.load(count_ptr) * (kv_heads * layers)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    offset = column if KEYS else row  # token within the tile
    channel = row if KEYS else column
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        layer = first_layer + unit // kv_heads % layers
        head = unit % kv_heads
        last = tl.load(filling_ptr + unit // (kv_heads * layers))
        slot = tl.load(slot_ptr + last)
        start = tl.load(position_ptr + last) - (GROUP - 1)
        tile = ((layer * num_slots + slot).to(tl.int64) * 2 + tl.where(start > 0, 1, 0)) * kv_heads
        kept = raw_ptr + ((tile + head) * 2 + KIND) * (GROUP * DIM) + offset * DIM + channel
        if FRESH:
            source = last - (GROUP - 1) + offset
            maybe = source >= 0
            same = tl.load(slot_ptr + source, mask=maybe, other=-1) == slot
            found = tl.load(position_ptr + source, mask=maybe, other=-1)
            here = maybe & same & (found == start + offset)
            at = fresh_ptr + ((source * kv_heads + head) * 2 + KIND) * DIM + channel
            x = tl.load(at, mask=here, other=0.0).to(tl.float32)
            x += tl.load(kept, mask=here == 0, other=0.0).to(tl.float32)
        else:
            x = tl.load(kept).to(tl.float32)
        log_row, log_column = _balance(x, FLOOR, ITERATIONS, ROWS, COLUMNS)
        row_factor = tl.exp(log_row)
        balanced = x / tl.exp(log_column) / row_factor
        zero = tl.min(balanced, axis=1, keep_dims=True)
        step = tl.maximum((tl.max(balanced, axis=1, keep_dims=True) - zero) / LEVELS, 1e-10)
        codes = tl.clamp(round_even((balanced - zero) / step), 0.0, LEVELS * 1.0).to(tl.int32)

        page = (layer * num_pages).to(tl.int64) + tl.load(page_ptr + last)
        word = tl.arange(0, QUARTER)
        if KEYS:
            quarter = tl.arange(0, 4)[:, None, None]
            words = tl.sum(tl.reshape(codes, [4, QUARTER, GROUP]) << (4 * quarter), axis=0)
            target = words_ptr + (page * kv_heads + head) * (GROUP * QUARTER)
            target += tl.arange(0, GROUP)[None, :] * QUARTER + word[:, None]
        else:
            quarter = tl.arange(0, 4)[None, :, None]
            words = tl.sum(tl.reshape(codes, [GROUP, 4, QUARTER]) << (BITS * quarter), axis=1)
            if HALVES == 2:
                half = tl.arange(0, 2)[:, None, None]
                words = tl.sum(tl.reshape(words, [2, GROUP // 2, QUARTER]) << (8 * half), axis=0)
            target = words_ptr + (page * kv_heads + head) * (VALUE_ROWS * QUARTER)
            target += tl.arange(0, VALUE_ROWS)[:, None] * QUARTER + word[None, :]
        tl.store(target, words.to(tl.int16))

        scales = scales_ptr + (page * kv_heads + head) * (3 * (DIM + GROUP))
        row_scales = scales if KEYS else scales + 3 * DIM + GROUP
        column_scales = scales + (3 * DIM if KEYS else 2 * DIM)
        half_type = scales_ptr.dtype.element_ty
        tl.store(row_scales + row, (row_factor * step).to(half_type))
        row_zero = tl.clamp(row_factor * zero, -65504.0, 65504.0)
        tl.store(row_scales + ROWS + row, row_zero.to(half_type))
        tl.store(column_scales + column, tl.exp(log_column).to(half_type))


def encode_filled(
    kv: KVarNKV, first_layer: int, layers: int, fresh: Array | None, step: AttentionStep
) -> KVarNKV:
    """Encode in some layers what the step filled; `fresh` None: the tails hold its tokens too."""
    num_pages, kv_heads, group, quarter = kv.key_words.shape[1:]
    num_tokens = step.positions.shape[0]
    refs = [jax.new_ref(part) for part in (kv.key_words, kv.value_words, kv.scales)]
    filling, count = _filling(step, min(num_tokens, num_tokens // group + kv.raw.shape[1]), group)
    for keys, bits, floor, iterations in (
        (True, 4, KEY_FLOOR, KEY_ITERATIONS),
        (False, kv.value_bits, VALUE_FLOOR, VALUE_ITERATIONS),
    ):
        triton_call(
            kv.raw if fresh is None else fresh, kv.raw, filling, count,
            step.slots, step.positions, step.pages,
            refs[0] if keys else refs[1], refs[2],
            kernel=_encode,
            name="kvarn_encode_keys" if keys else "kvarn_encode_values",
            out_type=(),
            grid=(min(_PROGRAMS, filling.shape[0] * kv_heads * layers),),
            num_warps=8,
            num_stages=1,
            first_layer=first_layer, num_pages=num_pages, num_slots=kv.raw.shape[1],
            layers=layers, kv_heads=kv_heads, KEYS=keys, BITS=bits, FRESH=fresh is not None,
            FLOOR=floor, ITERATIONS=iterations, GROUP=group, DIM=4 * quarter,
        )  # fmt: skip
    stores = (jax.freeze(ref) for ref in refs)
    return KVarNKV(*stores, kv.raw)


def _filling(step: AttentionStep, most: int, group: int) -> tuple[Array, Array]:
    """Which tokens fill a page, int32 [most], and how many do, int32 [1]."""
    fills = (step.positions + 1) % group == 0
    number = jnp.cumsum(fills, dtype=jnp.int32)
    places = jnp.where(fills, number - 1, most)
    tokens = jnp.arange(fills.shape[0], dtype=jnp.int32)
    return jnp.zeros(most, jnp.int32).at[places].set(tokens, mode="drop"), number[-1:]


@triton.jit
def _keep_raw(
    fresh_ptr, slot_ptr, position_ptr, raw_ptr, layer, num_slots, num_tokens,
    kv_heads: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    position = tl.load(position_ptr + token)
    page = position // GROUP
    following = token + GROUP - position % GROUP  # of the next page, if the step goes on there
    inside = following < num_tokens
    goes_on = tl.load(slot_ptr + following, mask=inside, other=-1) == slot
    start = tl.load(position_ptr + following, mask=inside, other=-1)
    goes_on = goes_on & (start == (page + 1) * GROUP)
    if (page == 0) | (goes_on == 0):
        row = tl.arange(0, ROWS)[:, None]  # head, keys or values
        valid = row < 2 * kv_heads
        dim = tl.arange(0, DIM)[None, :]
        x = tl.load(fresh_ptr + (token.to(tl.int64) * 2 * kv_heads + row) * DIM + dim, mask=valid)
        tile = (layer * num_slots + slot).to(tl.int64) * 2 + tl.where(page > 0, 1, 0)
        at = (tile * 2 * kv_heads + row) * GROUP + position % GROUP
        tl.store(raw_ptr + at * DIM + dim, x, mask=valid)


def keep_raw(kv: KVarNKV, layer: int, fresh: Array, step: AttentionStep) -> KVarNKV:
    """See `reference.keep_raw`."""
    num_slots, _, kv_heads, _, group, head_dim = kv.raw.shape[1:]
    tokens = step.positions.shape[0]
    raw = jax.new_ref(kv.raw)
    triton_call(
        fresh, step.slots, step.positions, raw, layer,
        kernel=_keep_raw,
        name="kvarn_keep_raw",
        out_type=(),
        grid=(tokens,),
        num_warps=4,
        num_slots=num_slots, num_tokens=tokens, kv_heads=kv_heads, GROUP=group, DIM=head_dim,
        ROWS=triton.next_power_of_2(2 * kv_heads),
    )  # fmt: skip
    return kv._replace(raw=jax.freeze(raw))
