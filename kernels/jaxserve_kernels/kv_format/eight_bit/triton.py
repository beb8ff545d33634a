"""8-bit keys and values: quantised where they are written, dequantised inside attention.

Scales never touch keys or values: the keys' multiply scores, the values' probabilities (int8) or
the result (fp8). One program of the attention per query tile, KV head and split of the context, as
in `paged_attention`; a head is two halves because its bytes lie in pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.kv_format.triton_parts import (
    LOG2_E,
    capability,
    head_halves,
    merge_splits,
    round_even,
)
from jaxserve_kernels.paged_attention.config import Config
from jaxserve_kernels.triton_call import triton_call

_MAX_HEADS = 8

_TARGET_PROGRAMS = 528
"""Four programs for each of an H100's multiprocessors: with two, 8 and 32 sequences took 1.2 and
1.4 times as long on an H200."""


@triton.jit
def _write(
    qkv_ptr, words_ptr, scales_ptr, layer, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    page_ptr, offset_ptr, q_ptr,
    num_pages, stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    page_size: tl.constexpr, eps: tl.constexpr, FP8: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS  # heads in the order queries, keys, values
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    low, high = head_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, first,
        stride, parts, q_heads, kv_heads, eps, q_ptr.dtype.element_ty, HEADS, HALF,
    )  # fmt: skip
    if first < q_heads:
        target = q_ptr + (token * q_heads + first + head[:, None]) * (2 * HALF) + dim[None, :]
        tl.store(target, low)
        tl.store(target + HALF, high)
    else:
        page = (layer * num_pages).to(tl.int64) + tl.load(page_ptr + token).to(tl.int64)
        is_value = tl.where(first >= q_heads + kv_heads, 1, 0)
        kv_head = first - q_heads - is_value * kv_heads + head
        row = ((page * kv_heads + kv_head) * 2 + is_value) * page_size
        row += tl.load(offset_ptr + token)
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        if FP8:
            scale = tl.load(scales_ptr + (layer * kv_heads + kv_head) * 2 + is_value)[:, None]
            fp8_low = tl.clamp(wide_low / scale, -448.0, 448.0).to(tl.float8e4nv)
            fp8_high = tl.clamp(wide_high / scale, -448.0, 448.0).to(tl.float8e4nv)
            low_byte = fp8_low.to(tl.uint8, bitcast=True).to(tl.int32)
            high_byte = fp8_high.to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            largest = tl.max(tl.maximum(tl.abs(wide_low), tl.abs(wide_high)), axis=1)
            inverse = tl.where(largest > 0, 127.0 / largest, 0.0)[:, None]
            tl.store(scales_ptr + row, largest / 127.0)
            low_byte = round_even(wide_low * inverse).to(tl.int32) + 128
            high_byte = round_even(wide_high * inverse).to(tl.int32) + 128
        words = (low_byte | (high_byte << 8)).to(tl.int16)
        tl.store(words_ptr + row[:, None] * HALF + dim[None, :], words)


@triton.jit
def _int8_halves(words):
    """Both bytes less 128, exact in bfloat16: the byte becomes the last of a float's mantissa."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a,b,c,d; .reg .f32 e,f,g,h,k; mov.f32 k,0f4B000080;
        prmt.b32 a,$2,0x4B000000,0x7440; prmt.b32 b,$2,0x4B000000,0x7442;
        prmt.b32 c,$2,0x4B000000,0x7441; prmt.b32 d,$2,0x4B000000,0x7443;
        mov.b32 e,a; mov.b32 f,b; mov.b32 g,c; mov.b32 h,d;
        sub.f32 e,e,k; sub.f32 f,f,k; sub.f32 g,g,k; sub.f32 h,h,k;
        mov.b32 a,e; mov.b32 b,f; mov.b32 c,g; mov.b32 d,h;
        prmt.b32 $0,a,b,0x7632; prmt.b32 $1,c,d,0x7632; }""",
        "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp8_halves(words):
    """Both bytes as numbers, exact in float16."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 x,y; .reg .b32 a,b; mov.b32 {x,y},$2;
        cvt.rn.f16x2.e4m3x2 a,x; cvt.rn.f16x2.e4m3x2 b,y;
        prmt.b32 $0,a,b,0x5410; prmt.b32 $1,a,b,0x7632; }""",
        "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _float_of_fp8(byte):
    """Sign, exponent and mantissa moved to their places in a float32, then its bias corrected."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def _halves(words, FP8: tl.constexpr, FAST: tl.constexpr):
    if FAST and FP8:
        first, second = _fp8_halves(words)
    elif FAST:
        first, second = _int8_halves(words)
    else:
        low = words.to(tl.int32) & 0xFF
        high = (words.to(tl.int32) >> 8) & 0xFF
        if FP8:
            first, second = _float_of_fp8(low), _float_of_fp8(high)
        else:
            first, second = (low - 128).to(tl.float32), (high - 128).to(tl.float32)
    return first, second


@triton.jit
def _visit(
    block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr, table, width,
    first_page, kv_head, row_position, scale,
    kv_heads: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One block of KEYS keys: the streamed softmax of the rows moves on."""
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
    k_low, k_high = _halves(words, FP8, FAST)
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
    if FP8:
        scores *= scale
    else:
        scores *= (tl.load(scales_ptr + kv_row) * scale)[None, :]
    last = tl.max(row_position, axis=0)
    if MASK:
        scores = tl.where(key_position[None, :] <= row_position[:, None], scores, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    weight = weight * shrink + tl.sum(probs, axis=1)
    v_row = kv_row + PAGE
    values = words_ptr + v_row[:, None] * HALF + dim[None, :]
    # What an earlier owner left past the end may be anything, even NaN.
    if MASK and FP8:
        words = tl.load(values, mask=key_position[:, None] <= last, other=0)
    else:
        words = tl.load(values)
    if not FP8:
        if MASK:
            probs *= tl.load(scales_ptr + v_row, mask=key_position <= last, other=0.0)[None, :]
        else:
            probs *= tl.load(scales_ptr + v_row)[None, :]
    v_low, v_high = _halves(words, FP8, FAST)
    probs = probs.to(v_low.dtype)
    acc_low = tl.dot(probs, v_low, acc_low * shrink[:, None], input_precision="ieee")
    acc_high = tl.dot(probs, v_high, acc_high * shrink[:, None], input_precision="ieee")
    return new_peak, weight, acc_low, acc_high


@triton.jit
def _attend(
    q_ptr, words_ptr, scales_ptr, layer, table_ptr, first_ptr, length_ptr, slot_ptr,
    position_ptr, out_ptr, peak_ptr, weight_ptr,
    num_pages, table_stride, scale: tl.constexpr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.load(length_ptr + tile)
    if length > 0:
        position = tl.load(position_ptr + tile)
        first = tl.load(first_ptr + tile).to(tl.int64)
        table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
        first_page = (layer * num_pages).to(tl.int64)
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, HALF)
        token = row // group
        valid = token < tl.minimum(length, tile_size)
        q_row = (first + token) * q_heads + kv_head * group + row % group
        q_at = q_ptr + q_row[:, None] * (2 * HALF) + dim[None, :]
        q_low = tl.load(q_at, mask=valid[:, None], other=0.0)
        q_high = tl.load(q_at + HALF, mask=valid[:, None], other=0.0)
        if FAST and FP8:
            q_low = q_low.to(tl.float16)
            q_high = q_high.to(tl.float16)
        elif not FAST:
            q_low = q_low.to(tl.float32)
            q_high = q_high.to(tl.float32)
        row_position = position + tl.minimum(token, length - 1)
        score_scale = scale * 1.0
        result_scale = 1.0
        if FP8:
            scales = scales_ptr + (layer * kv_heads + kv_head) * 2
            score_scale = tl.load(scales) * scale
            result_scale = tl.load(scales + 1)

        blocks = tl.cdiv(position + length, KEYS)
        per_split = tl.cdiv(blocks, SPLITS)
        begin = split * per_split
        end = tl.minimum(begin + per_split, blocks)
        peak = tl.full([ROWS], -1.0e30, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc_low = tl.zeros([ROWS, HALF], tl.float32)
        acc_high = tl.zeros([ROWS, HALF], tl.float32)
        masked_from = begin
        if ROWS > 16:  # long tiles: only the last blocks hold keys that a row must not see
            masked_from = tl.maximum(tl.minimum((position + 1) // KEYS, end), begin)
            for block in tl.range(begin, masked_from, num_stages=STAGES):
                peak, weight, acc_low, acc_high = _visit(
                    block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr,
                    table, table_stride, first_page, kv_head, row_position, score_scale,
                    kv_heads, HALF, PAGE, KEYS, FP8, FAST, False,
                )  # fmt: skip
        for block in tl.range(masked_from, end, num_stages=STAGES):
            peak, weight, acc_low, acc_high = _visit(
                block, q_low, q_high, peak, weight, acc_low, acc_high, words_ptr, scales_ptr,
                table, table_stride, first_page, kv_head, row_position, score_scale,
                kv_heads, HALF, PAGE, KEYS, FP8, FAST, True,
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


def attend[Cache: Int8KV | Fp8KV](
    qkv: Array,
    kv: Cache,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
) -> tuple[Array, Cache]:
    q, kv = write(qkv, kv, layer, norms, tables, step, eps=eps)
    return read(q, kv, layer, step, tile_size=tile_size), kv


def write[Cache: Int8KV | Fp8KV](
    qkv: Array,
    kv: Cache,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
) -> tuple[Array, Cache]:
    """Queries [tokens, q_heads, head_dim], and the cache with the step's keys and values."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = width // (2 * half) - 2 * kv_heads
    heads = math.gcd(math.gcd(q_heads, kv_heads), _MAX_HEADS)
    fp8 = isinstance(kv, Fp8KV)
    words = jax.new_ref(kv.words)
    scales = kv.scales if fp8 else jax.new_ref(kv.scales)
    q = triton_call(
        qkv, words, scales, layer, *norms, *tables, step.pages, step.offsets,
        kernel=_write,
        name="kv_write_8_bit",
        out_type=jax.ShapeDtypeStruct((tokens, q_heads, 2 * half), norms[0].dtype),
        grid=(tokens, (q_heads + 2 * kv_heads) // heads),
        num_warps=4,
        num_pages=num_pages, stride=tokens * width, parts=parts,
        q_heads=q_heads, kv_heads=kv_heads, page_size=page_size,
        eps=eps, FP8=fp8, HEADS=heads, HALF=half,
    )  # fmt: skip
    kv = kv._replace(words=jax.freeze(words))
    return q, kv if fp8 else kv._replace(scales=jax.freeze(scales))


def heuristic(*, tiles: int, kv_heads: int, rows: int, pages_per_seq: int, fp8: bool) -> Config:
    """A configuration for `rows` query rows (tokens x heads per KV head) in each tile."""
    if rows > 16:
        warps = 4 if fp8 or rows < 128 else 8
        return Config(splits=1, num_warps=warps, num_stages=2)
    wanted = max(1, min(_TARGET_PROGRAMS // (tiles * kv_heads), pages_per_seq, 32))
    warps = 2 if tiles * kv_heads > 2 * _TARGET_PROGRAMS else 4
    return Config(splits=1 << (wanted.bit_length() - 1), num_warps=warps, num_stages=3)


def read(
    q: Array,
    kv: Int8KV | Fp8KV,
    layer: int,
    step: AttentionStep,
    *,
    tile_size: int,
    config: Config | None = None,
) -> Array:
    """Attention of q [tokens, q_heads, head_dim] over what is in the cache."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    q_heads = q.shape[1]
    tiles, page_table = step.tiles, step.page_table
    num_tiles = tiles.first.shape[0]
    rows = tile_size * (q_heads // kv_heads)
    fp8 = isinstance(kv, Fp8KV)
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, rows=rows, pages_per_seq=page_table.shape[1], fp8=fp8
    )
    padded_rows = max(16, triton.next_power_of_2(rows))
    splits = config.splits
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = (num_tiles, kv_heads, splits, padded_rows)
    statistics = jax.ShapeDtypeStruct((math.prod(parts) if splits > 1 else 1,), jnp.float32)
    partial = jax.ShapeDtypeStruct((*parts, 2 * half), jnp.float32)
    out, peak, weight = triton_call(
        q, kv.words, kv.scales, layer, page_table, *tiles[:4],
        kernel=_attend,
        name="paged_attention_8_bit",
        out_type=(out_type if splits == 1 else partial, statistics, statistics),
        grid=(num_tiles, kv_heads, splits),
        num_warps=config.num_warps,
        num_pages=num_pages, table_stride=page_table.shape[1],
        scale=(2 * half) ** -0.5 * LOG2_E,
        q_heads=q_heads, kv_heads=kv_heads, tile_size=tile_size,
        ROWS=padded_rows, HALF=half, PAGE=page_size, KEYS=64,
        SPLITS=splits, STAGES=config.num_stages,
        FP8=fp8, FAST=q.dtype == jnp.bfloat16 and capability() >= (89 if fp8 else 80),
    )  # fmt: skip
    if splits == 1:
        return out
    return triton_call(
        out, peak, weight, tiles.first, tiles.length,
        kernel=merge_splits,
        name="paged_attention_merge",
        out_type=out_type,
        grid=(num_tiles, q_heads, tile_size),
        num_warps=4,
        q_heads=q_heads, kv_heads=kv_heads,
        ROWS=padded_rows, DIM=2 * half, SPLITS=splits,
    )  # fmt: skip
