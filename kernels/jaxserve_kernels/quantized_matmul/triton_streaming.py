"""Products of up to 64 tokens, launched early (PDL): codes stream through a ring in shared memory.

A program first fills the ring with codes and scales of its rows, and then waits for earlier
kernels, like `dense_matmul.triton_streaming`. Codes take a half or a quarter of the bytes of
bfloat16, so most of a weight is in flight by then. Codes become bfloat16 in registers, from which
the tensor cores read, one plane of inputs at a time; with int8 tokens they become int8.

A gated product cannot be split, because gating needs whole sums. Where its last wave would leave
at least half of the card idle, two programs take a half of the inputs of each of that wave's tiles.
Each of the two stores its sums. The one that ends last adds the other's to its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config, steps
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import (
    INT4,
    MXFP4,
    NO_ZERO,
    NVFP4,
    arrays,
    kind,
    tokens_of,
)
from jaxserve_kernels.quantized_matmul.triton_int8_k_step import SIXTEENTH, add_tiles
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP
from jaxserve_kernels.quantized_matmul.triton_results import finish, rows_of, sums_at
from jaxserve_kernels.quantized_matmul.triton_unpack import MXFP4_POWER
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Quantized

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_MXFP4 = gl.constexpr(MXFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.jit
def _copy(place, source, tile, left, EVEN: gl.constexpr):
    """Copies a k-step's part of a ring. EVEN: no tile of it is past the end."""
    if EVEN:
        async_copy.async_load(place, source)
    else:
        there, _ = gl.broadcast(tile < left, source)
        async_copy.async_load(place, source, mask=there)


@gluon.jit
def _copy_tokens(
    rings, place, own, k_step, left,
    tokens: gl.constexpr, columns: gl.constexpr, k: gl.constexpr, K_TILES: gl.constexpr,
    SCALED: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's inputs of the tokens, and the scales and sums of int8 ones. own: pointers
    to those of the first k-step, with the inputs' indices, and their tiles."""
    x_ring, factor_ring, sum_ring = rings
    x, depth, tile, factors, sums, tile_of_factor = own
    past = k_step * (K_TILES * 128)
    there, _ = gl.broadcast(tile < left, x)
    if columns < k:
        there = there & (depth + past < columns)
    async_copy.async_load(x_ring.index(place), x + past, mask=there)
    past = k_step * (K_TILES * tokens)
    if SCALED:
        _copy(factor_ring.index(place), factors + past, tile_of_factor, left, False)
    if SUMMED:
        _copy(sum_ring.index(place), sums + past, tile_of_factor, left, False)


@gluon.jit
def accumulate(
    x, packed_ptr, scale_ptr, second_ptr, program, first,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The program's weight rows times the tokens over one split of the inputs, from tile `first`.

    x: pointers to tokens in bfloat16, or in int8, and then to their scales and sums.
    second_ptr: zero points of 4-bit integers, or scales per row of NVFP4. n: rows of the result;
    gated, half of the weight's. columns: inputs of the tokens; the weight's other k - columns
    inputs count as 0. STEPS: tiles of 128 inputs in a split. K_TILES: tiles in a k-step. STAGES:
    k-steps in the rings. FIRST: the next kernel may start before this one reads its weights, not
    only after.
    """
    tiles: gl.constexpr = k // 128
    halves: gl.constexpr = 2 if KIND == _NVFP4 else 1
    width: gl.constexpr = (64 if KIND < _INT4 else 32) // halves  # words of a row in a tile
    groups: gl.constexpr = 128 // GROUP if KIND <= _INT4 else halves
    ahead: gl.constexpr = STAGES - 1
    warps: gl.constexpr = ROWS // 16
    rest: gl.constexpr = STEPS % K_TILES
    even: gl.constexpr = rest == 0
    x_ptr, factor_ptr, sum_ptr = x
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    int8: gl.constexpr = dtype == gl.int8
    if TOKENS <= MOST_BY_A_WARP:
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    else:
        inputs: gl.constexpr = 32 if int8 else 16
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, inputs])
    word_copy: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // width, width // 8], [warps, 1], [1, 0]
    )
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    wide: gl.constexpr = 16 if int8 else 8  # 16 bytes
    x_copy: gl.constexpr = gl.BlockedLayout([1, wide], [wide // 4, 128 // wide], [warps, 1], [1, 0])
    if tiles % STEPS == 0:
        steps: gl.constexpr = STEPS
    else:  # the last split is shorter, by whole k-steps
        gl.static_assert(even and tiles % K_TILES == 0)
        steps = gl.minimum(STEPS, tiles - first)

    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // width, width // 8, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], dtype)
    per_k_step: gl.constexpr = K_TILES * groups * ROWS
    words_per_k_step: gl.constexpr = K_TILES * halves * 64 * width  # of 64 rows
    word_ring = gl.allocate_shared_memory(
        gl.uint16, [STAGES, K_TILES * halves * ROWS, width], word_tile
    )
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, K_TILES * TOKENS, 128], x_tile)
    scale_ring = word_ring
    if groups > 0:
        scale_ring = gl.allocate_shared_memory(
            scale_ptr.dtype.element_ty, [STAGES, per_k_step], row_tile
        )
    zero_ring = scale_ring
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(
            second_ptr.dtype.element_ty, [STAGES, per_k_step], row_tile
        )

    factor_ring = scale_ring
    sum_ring = scale_ring
    summed: gl.constexpr = int8 and ZERO != _NO_ZERO
    if int8:
        factor_ring = gl.allocate_shared_memory(gl.float32, [STAGES, K_TILES * TOKENS], row_tile)
    if summed:
        sum_ring = gl.allocate_shared_memory(gl.float32, [STAGES, K_TILES * TOKENS], row_tile)
    x_rings = x_ring, factor_ring, sum_ring

    if EARLY and FIRST:
        gdc_launch_dependents()
    lane = gl.arange(0, K_TILES * halves * ROWS, gl.SliceLayout(1, word_copy))
    row = rows_of(program, lane % ROWS, n, GATED, ROWS)
    block = (row // 64).to(gl.int64) * (tiles * halves) + first * halves + lane // ROWS
    word = gl.arange(0, width, gl.SliceLayout(0, word_copy))[None, :]
    words = packed_ptr + (block * (64 * width) + row % 64 * width)[:, None] + word
    tile_of_words = (lane // (ROWS * halves))[:, None]
    if groups > 0:
        lane = gl.arange(0, per_k_step, flat)
        row = rows_of(program, lane % ROWS, n, GATED, ROWS)
        tile_of_row = lane // (groups * ROWS)
        of_row = (row // 64 * tiles + first + tile_of_row) * groups + lane // ROWS % groups
        of_row = of_row * 64 + row % 64
    lane = gl.arange(0, K_TILES * TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    x = x_ptr + lane % TOKENS * columns + (first + lane // TOKENS) * 128 + depth
    depth = (first + lane // TOKENS) * 128 + depth
    # A missing token is treated like a tile past the last one.
    tile_of_x = gl.where(lane % TOKENS < tokens, lane // TOKENS, tiles)
    lane = gl.arange(0, K_TILES * TOKENS, flat)
    tile_of_factor = gl.where(lane % TOKENS < tokens, lane // TOKENS, tiles)
    of_factor = (first + lane // TOKENS) * tokens + lane % TOKENS
    own = x, depth, tile_of_x, factor_ptr + of_factor, sum_ptr + of_factor, tile_of_factor

    for k_step in gl.static_range(ahead):
        if k_step * K_TILES < steps:
            left = steps - k_step * K_TILES
            source = words + k_step * words_per_k_step
            _copy(word_ring.index(k_step), source, tile_of_words, left, even)
            if groups > 0:
                at = of_row + k_step * (K_TILES * groups * 64)
                _copy(scale_ring.index(k_step), scale_ptr + at, tile_of_row, left, even)
            if ZERO != _NO_ZERO:
                _copy(zero_ring.index(k_step), second_ptr + at, tile_of_row, left, even)
        async_copy.commit_group()
    if groups == 0 or KIND == _NVFP4:
        row = rows_of(program, gl.arange(0, ROWS, gl.SliceLayout(1, mma)), n, GATED, ROWS)
        of_rows = gl.load((scale_ptr if groups == 0 else second_ptr) + row)
    if EARLY:
        gdc_wait()
    for k_step in gl.static_range(ahead):
        if k_step * K_TILES < steps:
            left = steps - k_step * K_TILES
            _copy_tokens(
                x_rings, k_step, own, k_step, left, tokens, columns, k, K_TILES, int8, summed
            )  # fmt: skip
        async_copy.commit_group()

    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    slot = 0
    # Not unrolled: the grid has no third dimension.
    for k_step in range(steps // K_TILES + gl.program_id(2)):
        async_copy.wait_group(ahead - 1)
        gl.barrier()
        if TOKENS > MOST_BY_A_WARP:
            fence_async_shared()
        later = k_step + ahead
        left = steps - later * K_TILES
        if left > 0:
            place = gl.where(slot == 0, ahead, slot - 1)
            source = words + later * words_per_k_step
            _copy(word_ring.index(place), source, tile_of_words, left, even)
            if groups > 0:
                at = of_row + later * (K_TILES * groups * 64)
                _copy(scale_ring.index(place), scale_ptr + at, tile_of_row, left, even)
            if ZERO != _NO_ZERO:
                _copy(zero_ring.index(place), second_ptr + at, tile_of_row, left, even)
            _copy_tokens(
                x_rings, place, own, later, left, tokens, columns, k, K_TILES, int8, summed
            )  # fmt: skip
        async_copy.commit_group()
        rings = word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot)
        there = x_ring.index(slot), factor_ring.index(slot), sum_ring.index(slot)
        acc = add_tiles(acc, rings, there, K_TILES, groups, ROWS, TOKENS, KIND, ZERO)
        slot = gl.where(slot == ahead, 0, slot + 1)
    if not even:
        async_copy.wait_group(0)
        gl.barrier()
        if TOKENS > MOST_BY_A_WARP:
            fence_async_shared()
        rings = word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot)
        there = x_ring.index(slot), factor_ring.index(slot), sum_ring.index(slot)
        acc = add_tiles(acc, rings, there, rest, groups, ROWS, TOKENS, KIND, ZERO)
    if EARLY and not FIRST:
        gdc_launch_dependents()

    if int8:
        acc *= SIXTEENTH
    elif KIND == _INT4:
        acc *= 64.0  # less_zero
    elif KIND == _NVFP4:
        acc *= (of_rows * 256.0)[:, None]
    elif KIND == _MXFP4:
        acc *= MXFP4_POWER
    elif groups == 0:
        acc *= of_rows[:, None]
    return acc


@gluon.jit
def _product(
    x_ptr, factor_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    program = gl.program_id(0)
    x = x_ptr, factor_ptr, sum_ptr
    acc = accumulate(
        x, packed_ptr, scale_ptr, second_ptr, program, gl.program_id(1) * STEPS,
        tokens, n, k, k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, STEPS, K_TILES, STAGES, FIRST,
        EARLY,
    )  # fmt: skip
    finish(acc, out_ptr, program, tokens, n, GATED)


@gluon.jit
def _product_in_halves(
    x_ptr, factor_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, ended_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, HALVED: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A gated product whose last HALVED tiles of rows have two programs each. HALF: tiles of 128
    inputs of the first of the two."""
    whole: gl.constexpr = 2 * n // ROWS - HALVED
    program = gl.program_id(0)
    x = x_ptr, factor_ptr, sum_ptr
    if program < whole:
        acc = accumulate(
            x, packed_ptr, scale_ptr, second_ptr, program, 0, tokens, n, k, k, GATED, KIND,
            GROUP, ZERO, TOKENS, ROWS, k // 128, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        finish(acc, out_ptr, program, tokens, n, GATED)
    else:
        part = program - whole
        tile = part // 2
        acc = accumulate(
            x, packed_ptr, scale_ptr, second_ptr, whole + tile, part % 2 * HALF, tokens, n, k,
            k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, HALF, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        gl.store(sums_at(partial_ptr, part, acc), acc)
        gl.barrier()
        if gl.atomic_add(ended_ptr + tile, 1, sem="acq_rel", scope="gpu") == 1:
            gl.barrier()
            # The sum of two does not depend on their order, so neither on who ends last.
            acc += gl.load(sums_at(partial_ptr, part ^ 1, acc))
            finish(acc, out_ptr, whole + tile, tokens, n, GATED)


def launch(
    x: Array | QuantizedTokens,
    weight: Quantized,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    read = tokens_of(x, weight, config, target)
    tiles, halved = weight.shape[0] // config.rows, config.halved
    options: dict[str, Any] = {
        "name": f"{'gated_' if gated else ''}linear_streaming_{type(weight).__name__}",
        "target": target,
        "num_warps": config.rows // 16,
        "tokens": tokens, "n": out_type.shape[-1], "k": k, **kind(weight),
        "GATED": gating(activation, gated=gated),
        "TOKENS": config.tokens, "ROWS": config.rows,
        "K_TILES": config.unroll, "STAGES": config.num_stages, "FIRST": config.first,
    }  # fmt: skip
    if halved == 0:
        return triton_call(
            *read, *arrays(weight),
            kernel=_product,
            out_type=out_type,
            grid=(tiles, config.splits),
            STEPS=steps(k // 128, config.splits, config.unroll),
            **options,
        )  # fmt: skip
    assert gated
    return triton_call(
        *read, *arrays(weight),
        kernel=_product_in_halves,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct((2 * halved, config.rows, config.tokens), jnp.float32),
            jax.ShapeDtypeStruct((halved,), jnp.int32),
        ),
        zeroed_outputs=(2,),
        grid=(tiles + halved,),
        HALF=steps(k // 128, 2, config.unroll), HALVED=halved,
        **options,
    )[0]  # fmt: skip
