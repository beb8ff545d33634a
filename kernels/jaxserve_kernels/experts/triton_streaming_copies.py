"""Parts of `triton_streaming.py`: copies to its rings, and prefetches to the L2 cache."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from jaxserve_kernels.experts.triton_streaming_blocks import row_of, token_of
from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO
from jaxserve_kernels.quantized_matmul.triton_planes import of_planes
from jaxserve_kernels.quantized_matmul.triton_rings import groups_of, words_of
from jaxserve_kernels.triton_prefetch import ask_for

_NO_ZERO = gl.constexpr(NO_ZERO.value)
_GUESSED_TILES = gl.constexpr(8)
"""Tiles of inputs that a program prefetches of the expert that it guesses."""


@gluon.jit
def guess(
    expert, packed_ptr, experts: gl.constexpr, n: gl.constexpr, tiles: gl.constexpr,
    tile_words: gl.constexpr, packed_size: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The first AHEAD programs prefetch gate's and up's codes to the L2 cache, as if each expert
    had one block of pairs."""
    early = expert * gl.num_programs(0) + gl.program_id(0) < AHEAD
    if early & (expert >= 0) & (expert < experts):
        warp = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0])) // 32
        codes = packed_ptr + expert.to(gl.int64) * packed_size
        for part in gl.static_range(2):
            block = (gl.program_id(0) + part * (n // 64)) * tiles
            for turn in gl.static_range(_GUESSED_TILES // WARPS):
                tile = gl.minimum(turn * WARPS + warp, tiles - 1)
                ask_for(codes + (block + tile) * tile_words, tile_words * 2)


@gluon.jit
def weight_source(
    packed_ptr, scale_ptr, second_ptr, n: gl.constexpr, k: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers to words, scales and zero points of the program's rows of an expert: see
    `copy_codes`."""
    tiles: gl.constexpr = k // 128
    width: gl.constexpr = words_of(KIND)
    groups: gl.constexpr = groups_of(KIND, GROUP)
    threads: gl.constexpr = [256 // width, width // 8]
    copy: gl.constexpr = gl.BlockedLayout([1, 8], threads, [WARPS, 1], [1, 0])
    block, inner = row_of(gl.arange(0, ROWS, gl.SliceLayout(1, copy)), n, GATED, ROWS)
    word = gl.arange(0, width, gl.SliceLayout(0, copy))[None, :]
    words = packed_ptr + ((block * (tiles * 64 * width) + inner * width)[:, None] + word)
    at = 0
    if groups > 0:
        lane = gl.arange(0, groups * ROWS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        block, inner = row_of(lane % ROWS, n, GATED, ROWS)
        at = (block * (tiles * groups) + lane // ROWS) * 64 + inner
    return words, scale_ptr + at, second_ptr + at


@gluon.jit
def scales_of_rows(
    scale_ptr, n: gl.constexpr, GATED: gl.constexpr, groups: gl.constexpr, ROWS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """The scales of the program's rows of an expert, if they have one each; 0 if not."""
    found = 0
    if groups == 0:
        block, inner = row_of(gl.arange(0, ROWS, gl.SliceLayout(1, mma)), n, GATED, ROWS)
        found = gl.load(scale_ptr + block * 64 + inner)
    return found


@gluon.jit
def copy_codes(
    rings, source, slot, k_step, tiles: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's tiles of codes and scales into a slot of the rings, if there are any."""
    word_ring, scale_ring, zero_ring = rings
    words, scales, zeros = source
    groups: gl.constexpr = groups_of(KIND, GROUP)
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = word_ring.index(slot).slice(part * ROWS, ROWS)
            async_copy.async_load(place, words + tile * (64 * words_of(KIND)))
            at = tile * (groups * 64)
            if groups > 0:
                place = scale_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
                async_copy.async_load(place, scales + at)
            if ZERO != _NO_ZERO:
                place = zero_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
                async_copy.async_load(place, zeros + at)


@gluon.jit
def token_source(
    x, order_ptr, begin, end, shared, tokens, choices: gl.constexpr, columns: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, SHARED: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers to the program's tokens and to the scales and sums of int8 ones: see `copy_tokens`.
    Plain tokens are copied in the order of the planes; int8 ones have the product's order."""
    x_ptr, factor_ptr, sum_ptr = x
    wide: gl.constexpr = 16 if x_ptr.dtype.element_ty == gl.int8 else 8  # 16 bytes
    copy: gl.constexpr = gl.BlockedLayout([1, wide], [wide // 4, 128 // wide], [WARPS, 1], [1, 0])
    token, there = token_of(
        order_ptr, begin, end, shared, tokens, choices, GATED, SHARED, TOKENS,
        gl.SliceLayout(1, copy),
    )  # fmt: skip
    depth = gl.arange(0, 128, gl.SliceLayout(0, copy))[None, :]
    if x_ptr.dtype.element_ty != gl.int8:
        depth = of_planes(depth, KIND)
    x = x_ptr + (token.to(gl.int64) * columns)[:, None] + depth
    one = 0
    has_factor = False
    if x_ptr.dtype.element_ty == gl.int8:
        one, has_factor = token_of(
            order_ptr, begin, end, shared, tokens, choices, GATED, SHARED, TOKENS,
            gl.BlockedLayout([1], [32], [WARPS], [0]),
        )  # fmt: skip
    return x, depth, there[:, None], factor_ptr + one, sum_ptr + one, has_factor


@gluon.jit
def copy_tokens(
    rings, source, slot, k_step, tokens, tiles: gl.constexpr, columns: gl.constexpr,
    ZERO: gl.constexpr, TOKENS: gl.constexpr, K_TILES: gl.constexpr,
):  # fmt: skip
    """Copies the same tiles of the tokens that are there, and the scales and sums of int8 ones.
    Inputs from `columns` on count as 0."""
    x_ring, factor_ring, sum_ring = rings
    x, depth, there, factors, sums, has_factor = source
    gl.static_assert(x_ring.dtype != gl.int8 or columns == tiles * 128)
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = x_ring.index(slot).slice(part * TOKENS, TOKENS)
            mask, _ = gl.broadcast(there, x)
            if columns < tiles * 128:
                mask = mask & (depth < columns - tile * 128)
            async_copy.async_load(place, x + tile * 128, mask=mask)
            if x_ring.dtype == gl.int8:
                place = factor_ring.index(slot).slice(part * TOKENS, TOKENS)
                async_copy.async_load(place, factors + tile * tokens, mask=has_factor)
                if ZERO != _NO_ZERO:
                    place = sum_ring.index(slot).slice(part * TOKENS, TOKENS)
                    async_copy.async_load(place, sums + tile * tokens, mask=has_factor)
