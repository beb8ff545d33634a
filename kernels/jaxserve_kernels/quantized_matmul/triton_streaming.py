"""Products of up to 64 tokens, launched early (PDL): codes stream through a ring in shared memory.

A program first fills the ring with codes and scales of its rows, and then waits for earlier
kernels, like `dense_matmul.triton_streaming`. Codes take a half or a quarter of the bytes of
bfloat16, so most of a weight is in flight by then. Codes become bfloat16 in registers, from which
the tensor cores read, one plane of inputs at a time.

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
from jaxserve_kernels.quantized_matmul.triton_arguments import (
    INT4,
    MXFP4,
    NO_ZERO,
    NVFP4,
    arrays,
    kind,
)
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP, add_k_steps
from jaxserve_kernels.quantized_matmul.triton_unpack import MXFP4_POWER
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Quantized

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_MXFP4 = gl.constexpr(MXFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.jit
def rows_of(program, lane, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr):
    """The weight rows of the program's lanes. Gated, every 8 rows of gate are followed by the same
    8 of up, so that a thread holds the sums of both."""
    if GATED:
        row = program * (ROWS // 2) + lane // 16 * 8 + lane % 8 + lane // 8 % 2 * n
    else:
        row = program * ROWS + lane
    return row


@gluon.jit
def _copy(place, source, tile, left, EVEN: gl.constexpr):
    """Copies a k-step's part of a ring. EVEN: no tile of it is past the end."""
    if EVEN:
        async_copy.async_load(place, source)
    else:
        there, _ = gl.broadcast(tile < left, source)
        async_copy.async_load(place, source, mask=there)


@gluon.jit
def _copy_inputs(place, x, depth, tile, left, columns: gl.constexpr, k: gl.constexpr):
    """Copies a k-step's inputs of the tokens. `depth`: index of the inputs at x."""
    there, _ = gl.broadcast(tile < left, x)
    if columns < k:
        there = there & (depth < columns)
    async_copy.async_load(place, x, mask=there)


@gluon.jit
def accumulate(
    x_ptr, packed_ptr, scale_ptr, second_ptr, program, first,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The program's weight rows times the tokens over one split of the inputs, from tile `first`.

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
    if TOKENS <= MOST_BY_A_WARP:
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 16])
    word_copy: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // width, width // 8], [warps, 1], [1, 0]
    )
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    if tiles % STEPS == 0:
        steps: gl.constexpr = STEPS
    else:  # the last split is shorter, by whole k-steps
        gl.static_assert(even and tiles % K_TILES == 0)
        steps = gl.minimum(STEPS, tiles - first)

    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // width, width // 8, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    per_k_step: gl.constexpr = K_TILES * groups * ROWS
    words_per_k_step: gl.constexpr = K_TILES * halves * 64 * width  # of 64 rows
    word_ring = gl.allocate_shared_memory(
        gl.uint16, [STAGES, K_TILES * halves * ROWS, width], word_tile
    )
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K_TILES * TOKENS, 128], x_tile)
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
            past = k_step * (K_TILES * 128)
            _copy_inputs(x_ring.index(k_step), x + past, depth + past, tile_of_x, left, columns, k)
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
            past = later * (K_TILES * 128)
            _copy_inputs(x_ring.index(place), x + past, depth + past, tile_of_x, left, columns, k)
        async_copy.commit_group()
        acc = add_k_steps(
            acc, word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot),
            x_ring.index(slot), K_TILES, groups, ROWS, TOKENS, KIND, ZERO,
        )  # fmt: skip
        slot = gl.where(slot == ahead, 0, slot + 1)
    if not even:
        async_copy.wait_group(0)
        gl.barrier()
        if TOKENS > MOST_BY_A_WARP:
            fence_async_shared()
        acc = add_k_steps(
            acc, word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot),
            x_ring.index(slot), rest, groups, ROWS, TOKENS, KIND, ZERO,
        )  # fmt: skip
    if EARLY and not FIRST:
        gdc_launch_dependents()

    if KIND == _INT4:
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
    x_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    program = gl.program_id(0)
    acc = accumulate(
        x_ptr, packed_ptr, scale_ptr, second_ptr, program, gl.program_id(1) * STEPS,
        tokens, n, k, k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, STEPS, K_TILES, STAGES, FIRST,
        EARLY,
    )  # fmt: skip
    finish(acc, out_ptr, program, tokens, n, GATED)


@gluon.jit
def _product_in_halves(
    x_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, ended_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, HALVED: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A gated product whose last HALVED tiles of rows have two programs each. HALF: tiles of 128
    inputs of the first of the two."""
    whole: gl.constexpr = 2 * n // ROWS - HALVED
    program = gl.program_id(0)
    if program < whole:
        acc = accumulate(
            x_ptr, packed_ptr, scale_ptr, second_ptr, program, 0, tokens, n, k, k, GATED, KIND,
            GROUP, ZERO, TOKENS, ROWS, k // 128, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        finish(acc, out_ptr, program, tokens, n, GATED)
    else:
        part = program - whole
        tile = part // 2
        acc = accumulate(
            x_ptr, packed_ptr, scale_ptr, second_ptr, whole + tile, part % 2 * HALF, tokens, n, k,
            k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, HALF, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        gl.store(sums_at(partial_ptr, part, acc), acc)
        gl.barrier()
        if gl.atomic_add(ended_ptr + tile, 1, sem="acq_rel", scope="gpu") == 1:
            gl.barrier()
            # The sum of two does not depend on their order, so neither on who ends last.
            acc += gl.load(sums_at(partial_ptr, part ^ 1, acc))
            finish(acc, out_ptr, whole + tile, tokens, n, GATED)


@gluon.jit
def sums_at(partial_ptr, index, acc):
    """Pointers to place `index` of sums that programs leave to others: [rows, tokens], as acc."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))[None, :]
    return partial_ptr + (index * ROWS + row) * TOKENS + token


@gluon.jit
def finish(acc, out_ptr, program, tokens: gl.constexpr, n: gl.constexpr, GATED: gl.constexpr):
    """Stores the sums of a program's rows, gated or as partial sums."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        values = gated_sums(gate, up, dtype, GATED).reshape([ROWS // 2, TOKENS])
        _store(values, out_ptr, program, tokens, n, ROWS // 16)
    else:
        out_ptr += gl.program_id(1) * (tokens * n)
        _store(acc.to(dtype), out_ptr, program, tokens, n, ROWS // 16)


@gluon.jit
def _store(
    values, out_ptr, program, tokens: gl.constexpr, n: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    rows: gl.constexpr = values.shape[0]
    if values.shape[1] <= MOST_BY_A_WARP:
        layout: gl.constexpr = values.type.layout
    else:
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
        values = gl.convert_layout(values, layout)
    row = program * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < tokens, values)
    gl.store(out_ptr + token * n + row, values, mask=there)


def launch(
    x: Array,
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
            x, *arrays(weight),
            kernel=_product,
            out_type=out_type,
            grid=(tiles, config.splits),
            STEPS=steps(k // 128, config.splits, config.unroll),
            **options,
        )  # fmt: skip
    assert gated
    return triton_call(
        x, *arrays(weight),
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
