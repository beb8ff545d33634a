"""Attention of single tokens over keys and values of 8 bits.

Scales never touch keys or values: the keys' multiply scores, the values' probabilities (int8) or
the result (fp8). One program per token, KV head and split of the context, as in `paged_attention`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.kv_format.eight_bit.triton_numbers import halves, numbers
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.paged_attention.config import LOG2_E, Config
from jaxserve_kernels.triton_call import triton_call

_TARGET_PROGRAMS = 528
"""Four programs for each of an H100's multiprocessors: with two, 8 and 32 sequences took 1.2 and
1.4 times as long on an H200."""


@triton.jit
def visit(
    block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr, table, width,
    first_page, kv_head, last, scale,
    kv_heads: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One block of KEYS keys, of which those up to position `last` count."""
    key_position = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, HALF)
    if PAGE >= KEYS:
        page = first_page + tl.load(table + block * KEYS // PAGE).to(tl.int64)
    else:  # the last block may reach past the table
        inside = key_position // PAGE < width
        entry = tl.load(table + key_position // PAGE, mask=inside, other=0)
        page = first_page + entry.to(tl.int64)
    kv_row = (page * kv_heads + kv_head) * (2 * PAGE) + key_position % PAGE
    words = tl.load(words_ptr + kv_row[:, None] * HALF + dim[None, :])
    k_low, k_high = halves(words, FP8, FAST)
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
    if FP8:
        scores *= scale
    else:
        scores *= (tl.load(scales_ptr + kv_row) * scale)[None, :]
    scores = tl.where(key_position[None, :] <= last, scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=1)
    v_row = kv_row + PAGE
    values = words_ptr + v_row[:, None] * HALF + dim[None, :]
    # What an earlier owner left past the end may be anything, even NaN.
    if FP8:
        words = tl.load(values, mask=key_position[:, None] <= last, other=0)
    else:
        words = tl.load(values)
        probs *= tl.load(scales_ptr + v_row, mask=key_position <= last, other=0.0)[None, :]
    v_low, v_high = halves(words, FP8, FAST)
    probs = probs.to(v_low.dtype)
    acc_low = tl.dot(probs, v_low, acc_low * shrink[:, None], input_precision="ieee")
    acc_high = tl.dot(probs, v_high, acc_high * shrink[:, None], input_precision="ieee")
    return new_peak, weight, acc_low, acc_high


@triton.jit
def _attend(
    q_ptr, words_ptr, scales_ptr, layer, table_ptr, first_ptr, length_ptr, slot_ptr,
    position_ptr, out_ptr, peak_ptr, weight_ptr,
    num_pages, table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    position = tl.load(position_ptr + tile)
    first = tl.load(first_ptr + tile).to(tl.int64)
    table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length > 0:
        first_page = (layer * num_pages).to(tl.int64)
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, HALF)
        valid = row < group
        q_row = first * q_heads + kv_head * group + row
        q_at = q_ptr + q_row[:, None] * (2 * HALF) + dim[None, :]
        q_low = tl.load(q_at, mask=valid[:, None], other=0.0)
        q_high = tl.load(q_at + HALF, mask=valid[:, None], other=0.0)
        if FAST and FP8:
            q_low = q_low.to(tl.float16)
            q_high = q_high.to(tl.float16)
        elif not FAST:
            q_low = q_low.to(tl.float32)
            q_high = q_high.to(tl.float32)
        score_scale = scale * 1.0
        result_scale = 1.0
        if FP8:
            scales = scales_ptr + (layer * kv_heads + kv_head) * 2
            score_scale = tl.load(scales) * scale
            result_scale = tl.load(scales + 1)

        blocks = position // KEYS + 1
        per_split = tl.cdiv(blocks, SPLITS)
        begin = split * per_split
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc_low = tl.zeros([ROWS, HALF], tl.float32)
        acc_high = tl.zeros([ROWS, HALF], tl.float32)
        for block in tl.range(begin, tl.minimum(begin + per_split, blocks), num_stages=STAGES):
            peak, weight, acc_low, acc_high = visit(
                block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr,
                table, table_stride, first_page, kv_head, position, score_scale,
                kv_heads, HALF, PAGE, KEYS, FP8, FAST,
            )  # fmt: skip

        acc_low *= result_scale
        acc_high *= result_scale
        if SPLITS == 1:
            at = out_ptr + q_row[:, None] * (2 * HALF) + dim[None, :]
            dtype = out_ptr.dtype.element_ty
            tl.store(at, (acc_low / weight[:, None]).to(dtype), mask=valid[:, None])
            tl.store(at + HALF, (acc_high / weight[:, None]).to(dtype), mask=valid[:, None])
        else:
            part = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS + row
            at = out_ptr + part[:, None] * (2 * HALF) + dim[None, :]
            tl.store(at, acc_low, mask=valid[:, None])
            tl.store(at + HALF, acc_high, mask=valid[:, None])
            tl.store(peak_ptr + part, peak, mask=valid)
            tl.store(weight_ptr + part, weight, mask=valid)


@triton.jit
def _merge_splits(
    acc_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Adds what the programs that share a context found, by their softmax weights."""
    tile = tl.program_id(0)
    q_head = tl.program_id(1)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if length > 0:
        split = tl.arange(0, SPLITS)
        dim = tl.arange(0, DIM)
        part = ((tile * kv_heads + q_head // group) * SPLITS + split).to(tl.int64) * ROWS
        part += q_head % group
        peaks = tl.load(peak_ptr + part)
        shrink = tl.exp2(peaks - tl.max(peaks, axis=0))
        weight = tl.sum(tl.load(weight_ptr + part) * shrink, axis=0)
        acc = tl.load(acc_ptr + part[:, None] * DIM + dim[None, :])
        out = tl.sum(acc * shrink[:, None], axis=0) / weight
        q_row = tl.load(first_ptr + tile).to(tl.int64) * q_heads + q_head
        tl.store(out_ptr + q_row * DIM + dim, out.to(out_ptr.dtype.element_ty))


def heuristic(*, tiles: int, kv_heads: int, pages_per_seq: int) -> Config:
    """A configuration for so many single tokens."""
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), pages_per_seq, 32))
    warps = 2 if tiles * kv_heads > 2 * _TARGET_PROGRAMS else 4
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=warps, num_stages=3)


def read(
    q: Array,
    kv: Int8KV | Fp8KV,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    out: jax.Ref | None = None,
    config: Config | None = None,
) -> Array | None:
    """Attention of single tokens, q [tokens, q_heads, head_dim]: returned, or stored in `out`."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    num_tiles, q_heads, head_dim = tiles.first.shape[0], *q.shape[1:]
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=page_table.shape[1]
    )
    rows = max(16, triton.next_power_of_2(q_heads // kv_heads))  # what the tensor cores take
    given = () if out is None else (out,)
    made = () if given else (jax.ShapeDtypeStruct(q.shape, q.dtype),)

    def launch(given: tuple[jax.Ref, ...], types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
        return triton_call(
            q, kv.words, kv.scales, layer, page_table, *tiles[:4], *given,
            kernel=_attend,
            name="paged_attention_8_bit",
            out_type=types,
            grid=(num_tiles, kv_heads, config.splits),
            num_warps=config.num_warps,
            num_pages=num_pages, table_stride=page_table.shape[1],
            scale=head_dim**-0.5 * LOG2_E,
            q_heads=q_heads, kv_heads=kv_heads,
            ROWS=rows, HALF=half, PAGE=page_size, KEYS=64,
            SPLITS=config.splits, STAGES=config.num_stages, **numbers(q, kv),
        )  # fmt: skip

    if config.splits == 1:
        nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
        result = launch(given, (*made, nothing, nothing))
        return None if given else result[0]
    parts = (num_tiles, kv_heads, config.splits, rows)
    statistics = jax.ShapeDtypeStruct(parts, jnp.float32)
    sums = jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)
    result = triton_call(
        *launch((), (sums, statistics, statistics)), tiles.first, tiles.length, *given,
        kernel=_merge_splits,
        name="paged_attention_merge",
        out_type=made,
        grid=(num_tiles, q_heads),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads, ROWS=rows, DIM=head_dim, SPLITS=config.splits,
    )  # fmt: skip
    return None if given else result[0]
