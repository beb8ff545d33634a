"""Rings in shared memory of streaming products: copies to them, and products of what they hold.

A ring has a place for each of STAGES k-steps of K_TILES tiles. Pointers are those of a program's
first k-step; they come with the tiles of their elements, because a last k-step may have fewer.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, MXFP4, NO_ZERO, NVFP4
from jaxserve_kernels.quantized_matmul.triton_int8_k_step import add_int8_k_steps
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP, add_k_steps
from jaxserve_kernels.quantized_matmul.triton_mxfp4_int8_k_step import add_mxfp4_int8_k_steps
from jaxserve_kernels.quantized_matmul.triton_planes import of_planes
from jaxserve_kernels.quantized_matmul.triton_results import rows_of

_MXFP4 = gl.constexpr(MXFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.constexpr_function
def halves_of(KIND: Any) -> int:
    """Tiles of codes in a tile of 128 inputs: NVFP4 has two of 64."""
    return 2 if NVFP4.value == KIND else 1


@gluon.constexpr_function
def words_of(KIND: Any) -> int:
    """16-bit words of a row in a tile of codes."""
    return (64 if INT4.value > KIND else 32) // (2 if NVFP4.value == KIND else 1)


@gluon.constexpr_function
def groups_of(KIND: Any, GROUP: Any) -> int:
    """Scales of a row in a tile of 128 inputs, or words of blocks' scales; 0: a row has one."""
    if INT4.value < KIND:
        return 2 if NVFP4.value == KIND else 1
    return 128 // GROUP


@gluon.jit
def weight_rings(
    scale_ptr, second_ptr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    ROWS: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rings of words, scales and zero points. Those that a format lacks are others."""
    width: gl.constexpr = words_of(KIND)
    groups: gl.constexpr = groups_of(KIND, GROUP)
    tile: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // width, width // 8, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape: gl.constexpr = [STAGES, K_TILES * halves_of(KIND) * ROWS, width]
    words = gl.allocate_shared_memory(gl.uint16, shape, tile)
    of_rows: gl.constexpr = [STAGES, K_TILES * groups * ROWS]
    scales = words
    if groups > 0:
        scales = gl.allocate_shared_memory(scale_ptr.dtype.element_ty, of_rows, flat)
    zeros = scales
    if ZERO != _NO_ZERO:
        zeros = gl.allocate_shared_memory(second_ptr.dtype.element_ty, of_rows, flat)
    return words, scales, zeros


@gluon.jit
def token_rings(
    x_ptr, spare, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rings of tokens, and of the scales and sums of int8 ones; for others these are `spare`."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(dtype, [STAGES, K_TILES * TOKENS, 128], tile)
    factors = spare
    sums = spare
    if dtype == gl.int8:
        factors = gl.allocate_shared_memory(gl.float32, [STAGES, K_TILES * TOKENS], flat)
        if ZERO != _NO_ZERO:
            sums = gl.allocate_shared_memory(gl.float32, [STAGES, K_TILES * TOKENS], flat)
    return x, factors, sums


@gluon.jit
def weight_source(
    packed_ptr, scale_ptr, second_ptr, program, first,
    n: gl.constexpr, k: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, K_TILES: gl.constexpr,
):  # fmt: skip
    """Pointers to the program's words, scales and zero points from tile `first` on: see
    `copy_weight`."""
    warps: gl.constexpr = ROWS // 16
    tiles: gl.constexpr = k // 128
    halves: gl.constexpr = halves_of(KIND)
    width: gl.constexpr = words_of(KIND)
    groups: gl.constexpr = groups_of(KIND, GROUP)
    threads: gl.constexpr = [256 // width, width // 8]
    copy: gl.constexpr = gl.BlockedLayout([1, 8], threads, [warps, 1], [1, 0])
    lane = gl.arange(0, K_TILES * halves * ROWS, gl.SliceLayout(1, copy))
    row = rows_of(program, lane % ROWS, n, GATED, ROWS)
    block = (row // 64).to(gl.int64) * (tiles * halves) + first * halves + lane // ROWS
    word = gl.arange(0, width, gl.SliceLayout(0, copy))[None, :]
    words = packed_ptr + (block * (64 * width) + row % 64 * width)[:, None] + word
    tile_of_words = (lane // (ROWS * halves))[:, None]
    of_row = 0
    tile_of_row = 0
    if groups > 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        lane = gl.arange(0, K_TILES * groups * ROWS, flat)
        row = rows_of(program, lane % ROWS, n, GATED, ROWS)
        tile_of_row = lane // (groups * ROWS)
        of_row = (row // 64 * tiles + first + tile_of_row) * groups + lane // ROWS % groups
        of_row = of_row * 64 + row % 64
    return words, tile_of_words, scale_ptr, second_ptr, of_row, tile_of_row


@gluon.jit
def token_source(
    x_ptr, factor_ptr, sum_ptr, first,
    tokens: gl.constexpr, k: gl.constexpr, columns: gl.constexpr, KIND: gl.constexpr,
    TOKENS: gl.constexpr, K_TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers to tokens, and to the scales and sums of int8 ones, from tile `first` on: see
    `copy_tokens`. A missing token is treated like a tile past the last one."""
    tiles: gl.constexpr = k // 128
    wide: gl.constexpr = 16 if x_ptr.dtype.element_ty == gl.int8 else 8  # 16 bytes
    threads: gl.constexpr = [wide // 4, 128 // wide]
    copy: gl.constexpr = gl.BlockedLayout([1, wide], threads, [WARPS, 1], [1, 0])
    lane = gl.arange(0, K_TILES * TOKENS, gl.SliceLayout(1, copy))[:, None]
    depth = of_planes(gl.arange(0, 128, gl.SliceLayout(0, copy)), KIND)[None, :]
    x = x_ptr + lane % TOKENS * columns + (first + lane // TOKENS) * 128 + depth
    depth = (first + lane // TOKENS) * 128 + depth
    tile_of_x = gl.where(lane % TOKENS < tokens, lane // TOKENS, tiles)
    lane = gl.arange(0, K_TILES * TOKENS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    tile_of_factor = gl.where(lane % TOKENS < tokens, lane // TOKENS, tiles)
    at = (first + lane // TOKENS) * tokens + lane % TOKENS
    return x, depth, tile_of_x, factor_ptr + at, sum_ptr + at, tile_of_factor


@gluon.jit
def _copy(place, source, tile, left, EVEN: gl.constexpr):
    """Copies a k-step's part of a ring. EVEN: no tile of it is past the end."""
    if EVEN:
        async_copy.async_load(place, source)
    else:
        there, _ = gl.broadcast(tile < left, source)
        async_copy.async_load(place, source, mask=there)


@gluon.jit
def copy_weight(
    rings, place, source, k_step, left,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, K_TILES: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's words, scales and zero points to a place of their rings. left: tiles from
    this k-step on."""
    word_ring, scale_ring, zero_ring = rings
    words, tile_of_words, scale_ptr, second_ptr, of_row, tile_of_row = source
    groups: gl.constexpr = groups_of(KIND, GROUP)
    past = k_step * (K_TILES * halves_of(KIND) * 64 * words_of(KIND))
    _copy(word_ring.index(place), words + past, tile_of_words, left, EVEN)
    if groups > 0:
        at = of_row + k_step * (K_TILES * groups * 64)
        _copy(scale_ring.index(place), scale_ptr + at, tile_of_row, left, EVEN)
        if ZERO != _NO_ZERO:
            _copy(zero_ring.index(place), second_ptr + at, tile_of_row, left, EVEN)


@gluon.jit
def copy_tokens(
    rings, place, source, k_step, left,
    tokens: gl.constexpr, columns: gl.constexpr, k: gl.constexpr, K_TILES: gl.constexpr,
    ZERO: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's inputs of the tokens, and the scales and sums of int8 ones. Inputs from
    `columns` on count as 0."""
    x_ring, factor_ring, sum_ring = rings
    x, depth, tile, factors, sums, tile_of_factor = source
    past = k_step * (K_TILES * 128)
    there, _ = gl.broadcast(tile < left, x)
    if columns < k:
        there = there & (depth + past < columns)
    async_copy.async_load(x_ring.index(place), x + past, mask=there)
    if x_ring.dtype == gl.int8:
        past = k_step * (K_TILES * tokens)
        _copy(factor_ring.index(place), factors + past, tile_of_factor, left, False)
        if ZERO != _NO_ZERO:
            _copy(sum_ring.index(place), sums + past, tile_of_factor, left, False)


@gluon.constexpr_function
def mma_of(dtype: Any, TOKENS: Any, WARPS: Any) -> Any:
    """The layout of sums [rows, TOKENS]: of single warps up to MOST_BY_A_WARP tokens, else of
    warpgroups."""
    if TOKENS <= MOST_BY_A_WARP:
        return gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    depth = 32 if dtype == gl.int8 else 16
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, depth])


@gluon.jit
def wait_for_copies(behind: gl.constexpr, TOKENS: gl.constexpr):
    """Waits until all but `behind` groups of copies have arrived, for all warps."""
    async_copy.wait_group(behind)
    gl.barrier()
    if TOKENS > MOST_BY_A_WARP:
        fence_async_shared()


@gluon.jit
def add_tiles(
    acc, weight, place, own, own_place,
    COUNT: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    bias=0, BIASED: gl.constexpr = False, largest=0, table_ptr=0,
):  # fmt: skip
    """Adds the products of a k-step's first COUNT tiles. weight: rings of words, scales and zero
    points, and the k-step's place there. own: those of tokens, and of int8 ones' scales and sums.
    bias, BIASED: see `add_k_steps`. largest, table_ptr: see `add_mxfp4_int8_k_steps`."""
    words, scales, zeros = weight[0].index(place), weight[1].index(place), weight[2].index(place)
    x, factors, sums = own[0].index(own_place), own[1].index(own_place), own[2].index(own_place)
    if x.dtype == gl.int8 and KIND == _MXFP4:
        acc = add_mxfp4_int8_k_steps(acc, words, scales, x, factors, largest, table_ptr, COUNT)
    elif x.dtype == gl.int8:
        acc = add_int8_k_steps(acc, words, scales, zeros, x, factors, sums, COUNT, ZERO)
    else:
        acc = add_k_steps(
            acc, words, scales, zeros, x, COUNT, groups_of(KIND, GROUP), acc.shape[0], acc.shape[1],
            KIND, ZERO, bias, BIASED,
        )  # fmt: skip
    return acc
