"""Attention of a decode step's tokens over keys and values of 8 bits, from the projection's partial
sums.

A program takes one token, KV head and part of the context, as in `triton_attention`, but computes
what it needs of the token itself: no kernel lies between, and what earlier steps have left is
copied while the product before runs. The part that holds the token's place sees its key first, and
writes it and the value.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs.triton_parts import group_halves, row_of
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.kv_format.eight_bit.triton_attention import KEYS, visit
from jaxserve_kernels.kv_format.eight_bit.triton_inputs import bytes_of
from jaxserve_kernels.kv_format.eight_bit.triton_numbers import float_of, numbers
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.paged_attention.triton import merge, part_types
from jaxserve_kernels.triton_call import triton_call

MAX_TOKENS = 16
"""Of more, each program computing them costs more than it saves."""

_TARGET_PROGRAMS = 528
"""Four for each of an H100's multiprocessors, as many as their registers leave room for."""


@triton.jit
def _begin(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
    words_ptr, scales_ptr, kv_row, owner, key_scale, value_scale, scale,
    stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    eps: tl.constexpr, dtype: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The queries, and what a softmax knows that has seen nothing, or in the program that owns the
    token its own key, which goes to row `kv_row`."""
    group: tl.constexpr = q_heads // kv_heads
    low, high = group_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
        stride, parts, q_heads, kv_heads, eps, dtype, ROWS, HALF, EARLY,
    )  # fmt: skip
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, HALF], tl.float32)
    acc_high = acc_low
    if owner:
        row = tl.arange(0, ROWS)
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        given = tl.where(row == group, key_scale, value_scale)
        low_byte, high_byte, scales = bytes_of(wide_low, wide_high, given, FP8)
        fresh = (row == group) | (row == group + 1)
        at = kv_row + tl.where(row > group, PAGE, 0)
        target = words_ptr + at[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(target, (low_byte | (high_byte << 8)).to(tl.int16), mask=fresh[:, None])
        if not FP8:
            tl.store(scales_ptr + at, scales, mask=fresh)
            key_scale = tl.sum(tl.where(row == group, scales, 0.0), axis=0)
            value_scale = tl.sum(tl.where(row == group + 1, scales, 0.0), axis=0)
        low_code = float_of(low_byte, FP8)
        high_code = float_of(high_byte, FP8)
        peak = tl.sum(
            wide_low * row_of(low_code, group) + wide_high * row_of(high_code, group), axis=1
        )
        peak *= key_scale * scale
        weight += 1.0
        acc_low += row_of(low_code, group + 1)
        acc_high += row_of(high_code, group + 1)
        if not FP8:
            acc_low *= value_scale
            acc_high *= value_scale
    factor_type: tl.constexpr = tl.float16 if FAST and FP8 else dtype
    return low.to(factor_type), high.to(factor_type), peak, weight, acc_low, acc_high


@triton.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, words_ptr, scales_ptr, layer,
    page_ptr, offset_ptr, table_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr,
    num_pages, table_stride,
    stride: tl.constexpr, parts: tl.constexpr, eps: tl.constexpr, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program per tile, KV head and part."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    token = tl.load(first_ptr + tile).to(tl.int64)
    table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
    blocks = position // KEYS + 1
    per_split = tl.cdiv(blocks, SPLITS)
    begin = split * per_split
    stop = tl.minimum(begin + per_split, blocks)
    if EARLY:
        gdc_launch_dependents()
    if length == 0:
        if EARLY:
            gdc_wait()  # so that this kernel never ends before those that it follows
    elif begin < stop:
        first_page = (layer * num_pages).to(tl.int64)
        new_page = first_page + tl.load(page_ptr + token)
        new_row = (new_page * kv_heads + kv_head) * (2 * PAGE) + tl.load(offset_ptr + token)
        key_scale = 1.0
        value_scale = 1.0
        if FP8:
            scales = scales_ptr + (layer * kv_heads + kv_head) * 2
            key_scale = tl.load(scales)
            value_scale = tl.load(scales + 1)
        q_low = tl.zeros([ROWS, HALF], tl.float16 if FAST and FP8 else dtype)
        q_high = q_low
        peak = tl.zeros([ROWS], tl.float32)
        weight = peak
        acc_low = tl.zeros([ROWS, HALF], tl.float32)
        acc_high = acc_low
        # In the loop's first pass, copies of what later ones read are under way: the ring is
        # filled before the loop.
        for block in tl.range(begin, stop, num_stages=STAGES):
            if block == begin:
                q_low, q_high, peak, weight, acc_low, acc_high = _begin(
                    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
                    words_ptr, scales_ptr, new_row, stop == blocks, key_scale, value_scale, scale,
                    stride, parts, q_heads, kv_heads, eps, dtype,
                    ROWS, HALF, PAGE, FP8, FAST, EARLY,
                )  # fmt: skip
            peak, weight, acc_low, acc_high = visit(
                block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr,
                table, table_stride, first_page, kv_head, position - 1, key_scale * scale,
                kv_heads, HALF, PAGE, KEYS, FP8, FAST,
            )  # fmt: skip
        if FP8:
            acc_low *= value_scale
            acc_high *= value_scale
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, HALF)[None, :]
        valid = row < group
        if per_split >= blocks:  # the first part is everything
            q_row = token * q_heads + kv_head * group + row
            at = out_ptr + q_row[:, None] * (2 * HALF) + dim
            tl.store(at, (acc_low / weight[:, None]).to(dtype), mask=valid[:, None])
            tl.store(at + HALF, (acc_high / weight[:, None]).to(dtype), mask=valid[:, None])
        elif SPLITS > 1:
            part = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS + row
            sums = part_ptr + part[:, None] * (2 * HALF) + dim
            tl.store(sums, acc_low, mask=valid[:, None])
            tl.store(sums + HALF, acc_high, mask=valid[:, None])
            tl.store(peak_ptr + part, peak, mask=valid)
            tl.store(weight_ptr + part, weight, mask=valid)


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int) -> Config:
    """A configuration for so many single tokens."""
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), pages_per_seq, 64))
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=2, num_stages=3)


def attend[Cache: Int8KV | Fp8KV](
    qkv: Array,
    kv: Cache,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    config: Config | None = None,
) -> tuple[Array, Cache]:
    """`kv_format.attend` of single tokens: the result, and kv with their keys and values."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    parts, tokens, width = qkv.shape
    tiles, dtype = step.tiles.in_one_list(), norms[0].dtype
    q_heads, num_tiles = width // (2 * half) - 2 * kv_heads, tiles.first.shape[0]
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=step.page_table.shape[1]
    )
    rows = max(16, triton.next_power_of_2(q_heads // kv_heads + 2))
    fp8 = isinstance(kv, Fp8KV)
    words = jax.new_ref(kv.words)
    scales = kv.scales if fp8 else jax.new_ref(kv.scales)
    out, *sums = triton_call(
        qkv, *norms, *tables, words, scales, layer, step.pages, step.offsets,
        step.page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_8_bit_inputs",
        out_type=(
            jax.ShapeDtypeStruct((tokens, q_heads, 2 * half), dtype),
            *part_types(num_tiles, kv_heads, config.splits, rows, 2 * half),
        ),
        grid=(num_tiles, kv_heads, config.splits),
        num_warps=config.num_warps,
        num_pages=num_pages, table_stride=step.page_table.shape[1],
        stride=tokens * width, parts=parts, eps=eps, scale=(2 * half) ** -0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=rows, HALF=half, PAGE=page_size, KEYS=KEYS,
        SPLITS=config.splits, STAGES=config.num_stages, **numbers(norms[0], kv),
    )  # fmt: skip
    if config.splits > 1:
        merged = jax.new_ref(out)
        merge(
            tuple(sums), tiles, merged,
            tile_size=1, kv_heads=kv_heads, keys=KEYS, min_blocks=1,
        )  # fmt: skip
        out = jax.freeze(merged)
    kv = kv._replace(words=jax.freeze(words))
    return out, kv if fp8 else kv._replace(scales=jax.freeze(scales))
