"""Parts of `triton_streaming.py`: copies to its rings, and prefetches to the L2 cache."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO
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
def copy_codes(
    word_ring, scale_ring, zero_ring, words, scales, zeros, slot, k_step,
    tiles: gl.constexpr, groups: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
    ZERO: gl.constexpr, width: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's tiles of codes and scales into a slot of the rings, if there are any."""
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = word_ring.index(slot).slice(part * ROWS, ROWS)
            async_copy.async_load(place, words + tile * (64 * width))
            at = tile * (groups * 64)
            if groups > 0:
                place = scale_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
                async_copy.async_load(place, scales + at)
            if ZERO != _NO_ZERO:
                place = zero_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
                async_copy.async_load(place, zeros + at)


@gluon.jit
def copy_inputs(
    x_ring, x, depth, there, slot, k_step,
    tiles: gl.constexpr, columns: gl.constexpr, TOKENS: gl.constexpr, K_TILES: gl.constexpr,
):  # fmt: skip
    """Copies the same tiles of the tokens that are `there`; inputs from `columns` on count as 0.
    `depth`: inputs of a tile, in the order of the planes."""
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = x_ring.index(slot).slice(part * TOKENS, TOKENS)
            mask, _ = gl.broadcast(there, x)
            if columns < tiles * 128:
                mask = mask & (depth < columns - tile * 128)
            async_copy.async_load(place, x + tile * 128, mask=mask)
