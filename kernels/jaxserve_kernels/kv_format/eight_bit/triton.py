"""8-bit keys and values: quantised where they are written, dequantised inside attention.

Of single tokens, scales never touch keys or values: the keys' multiply scores, the values'
probabilities (int8) or the result (fp8). One program per token, KV head and split of the context,
as in `paged_attention`; a head is two halves because its bytes lie in pairs. Chunks see what
`_expand` makes of their pages.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.kv_format import chunks
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.kv_format.triton_parts import (
    LOG2_E,
    head_halves,
    round_even,
    rows,
    split_attention,
)
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention
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
    k_low, k_high = _halves(words, FP8, FAST)
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
    q_heads: tl.constexpr, kv_heads: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = q_heads // kv_heads
    if tl.load(length_ptr + tile) > 0:
        position = tl.load(position_ptr + tile)
        first = tl.load(first_ptr + tile).to(tl.int64)
        table = table_ptr + tl.load(slot_ptr + tile).to(tl.int64) * table_stride
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
            peak, weight, acc_low, acc_high = _visit(
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
def _expand(
    words_ptr, scales_ptr, page_ptr, taken_ptr, out_ptr, layer, num_pages,
    kv_heads: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head in page after page, times their scales."""
    kv_head = tl.program_id(1)
    row = tl.arange(0, 2 * PAGE)  # keys, then values
    dim = tl.arange(0, HALF)[None, :]
    first_page = (layer * num_pages).to(tl.int64)
    for place in range(tl.program_id(0), tl.load(taken_ptr), tl.num_programs(0)):
        page = first_page + tl.load(page_ptr + place)
        source = (page * kv_heads + kv_head) * (2 * PAGE) + row
        low, high = _halves(tl.load(words_ptr + source[:, None] * HALF + dim), FP8, FAST)
        if FP8:
            scale = tl.load(scales_ptr + (layer * kv_heads + kv_head) * 2 + row // PAGE)[:, None]
        else:
            scale = tl.load(scales_ptr + source)[:, None]
        dtype = out_ptr.dtype.element_ty
        target = (place * kv_heads + kv_head).to(tl.int64) * (2 * PAGE) + row
        at = out_ptr + target[:, None] * (2 * HALF) + dim
        tl.store(at, (low.to(tl.float32) * scale).to(dtype))
        tl.store(at + HALF, (high.to(tl.float32) * scale).to(dtype))


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
    if tile_size == 1:
        result = read(q, kv, layer, step.page_table, step.tiles.in_one_list())
        assert result is not None
        return result, kv
    result = _read_chunks(q, kv, layer, step, tile_size)
    if step.tiles.singles is None:
        return result, kv
    out = jax.new_ref(result)
    read(q, kv, layer, step.page_table, step.tiles.singles, out)
    return jax.freeze(out), kv


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
    num_tiles = tiles.first.shape[0]
    config = config or heuristic(
        tiles=num_tiles, kv_heads=kv_heads, pages_per_seq=page_table.shape[1]
    )

    def launch(given: tuple[jax.Ref, ...], types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
        return triton_call(
            q, kv.words, kv.scales, layer, page_table, *tiles[:4], *given,
            kernel=_attend,
            name="paged_attention_8_bit",
            out_type=types,
            grid=(num_tiles, kv_heads, config.splits),
            num_warps=config.num_warps,
            num_pages=num_pages, table_stride=page_table.shape[1],
            scale=(2 * half) ** -0.5 * LOG2_E,
            q_heads=q.shape[1], kv_heads=kv_heads,
            ROWS=rows(q, kv_heads), HALF=half, PAGE=page_size, KEYS=64,
            SPLITS=config.splits, STAGES=config.num_stages, **_numbers(q, kv),
        )  # fmt: skip

    return split_attention(launch, q, tiles, kv_heads, config.splits, out)


def _read_chunks(
    q: Array, kv: Int8KV | Fp8KV, layer: int, step: AttentionStep, tile_size: int
) -> Array:
    """Attention of the tiles that are not single tokens."""
    num_pages, kv_heads, _, page_size, half = kv.words.shape[1:]
    slots, width = step.page_table.shape
    each = chunks.of_tiles(step.tiles, slots)
    places = chunks.divide(
        (each.end + page_size - 1) // page_size, chunks.capacity(width * page_size) // page_size
    )
    count = places.slot.shape[0]
    pages = step.page_table.at[places.slot, places.number].get(mode="clip")
    expanded = triton_call(
        kv.words, kv.scales, pages, places.taken,
        kernel=_expand,
        name="expand_8_bit",
        out_type=jax.ShapeDtypeStruct((1, count, kv_heads, 2, page_size, 2 * half), q.dtype),
        grid=(min(count, chunks.PROGRAMS // kv_heads), kv_heads),
        num_warps=4,
        layer=layer, num_pages=num_pages,
        kv_heads=kv_heads, HALF=half, PAGE=page_size, **_numbers(q, kv),
    )  # fmt: skip
    table = jnp.minimum(places.first[:, None] + jnp.arange(width, dtype=jnp.int32), count - 1)
    tiles = step.tiles._replace(singles=None)
    return paged_attention(q, expanded, 0, table, tiles, tile_size=tile_size)


def _numbers(q: Array, kv: Int8KV | Fp8KV) -> dict[str, bool]:
    """Which numbers the bytes are, and whether there are instructions that convert them."""
    fp8 = isinstance(kv, Fp8KV)
    fast = q.dtype == jnp.bfloat16 and target.compute_capability() >= (89 if fp8 else 80)
    return {"FP8": fp8, "FAST": fast}
