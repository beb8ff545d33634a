"""Products of many tokens in e4m3 with 4-bit weights, on Hopper: each code is converted once.

A program walks over tiles of 128 rows by up to 256 tokens. A producer warp copies codes and tokens
(TMA) and scales into rings in shared memory. Two warpgroups of 64 rows each convert their codes to
e4m3 in registers (`hopper_operand`), and multiply (`hopper_sums`).

If the number of tiles exceeds that of multiprocessors and is not a multiple of it, all programs get
the same number of steps. Two programs may then share a tile, and the one with its first steps
finishes it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.hopper_operand import WORDS, of_rows
from jaxserve_kernels.quantized_matmul.e4m3.hopper_sums import (
    add_floats,
    add_integers,
    less_zeros,
)
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NVFP4, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_unpack import power
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Quantized

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)


@gluon.jit
def _range(program, programs, tiles: gl.constexpr, all_steps: gl.constexpr, SHARED: gl.constexpr):
    """The program's first tile, the tile after its last one, and their stride. SHARED: also its
    first and last step, counted over all tiles."""
    begin = program * (tiles * all_steps) // programs
    end = (program + 1) * (tiles * all_steps) // programs
    if SHARED:
        start = begin // all_steps
        stop = (end + all_steps - 1) // all_steps
        by = 1
    else:
        start = program
        stop = tiles
        by = programs
    return start, stop, by, begin, end


@gluon.jit
def _tile(
    tile, begin, end, token_tiles: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    STEPS: gl.constexpr, all_steps: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """The token tile, first row tile (of 64 rows), split, first step and number of steps of a
    tile."""
    split = tile // token_tiles % SPLITS
    row_tile = tile // (token_tiles * SPLITS) * (1 if GATED else 2)
    if SHARED:
        first = gl.maximum(begin - tile * all_steps, 0)
        steps = gl.minimum(end - tile * all_steps, all_steps) - first
    else:
        first = split * STEPS
        steps = gl.minimum(STEPS, all_steps - first)
    return tile % token_tiles, row_tile, split, first, steps


@gluon.jit
def _consume(
    x_ring, a_ring, b_ring, a_scales, b_scales, sums, ready, free, token_scale_ptr,
    sum_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, flag_ptr, program, programs,
    part: gl.constexpr,
    tokens: gl.constexpr, padded: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, SPLITS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Warpgroup `part`: 32 rows of each half of each of the program's tiles."""
    # Rows of scales per 128 inputs.
    EACH: gl.constexpr = 128 // GROUP if KIND == _INT4 else 2 if KIND == _NVFP4 else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_token: gl.constexpr = gl.SliceLayout(0, mma)
    all_steps: gl.constexpr = k // 128
    scales: gl.constexpr = all_steps * EACH * 64
    token_tiles: gl.constexpr = padded // TOKENS
    row_tiles: gl.constexpr = n // 64 if GATED else n // 128
    half: gl.constexpr = n // 64 if GATED else 1  # distance of the halves in row tiles of codes
    at = 0
    lane = part * 32 + gl.arange(0, 32, gl.SliceLayout(1, WORDS))
    number = gl.arange(0, 64, by_row)
    within = part * 32 + number // 16 * 8 + number % 8
    flag = flag_ptr + program * 2 + part
    partial = partial_ptr + (program * 2 + part) * (64 * TOKENS) + number * TOKENS
    column = gl.arange(0, TOKENS, by_token)[None, :]
    start, stop, by, begin, end = _range(
        program, programs, token_tiles * row_tiles * SPLITS, all_steps, SHARED
    )
    for tile in range(start, stop, by):
        token_tile, row_tile, split, first, steps = _tile(
            tile, begin, end, token_tiles, GATED, SPLITS, STEPS, all_steps, SHARED
        )
        mine = row_tile + number // 8 % 2 * half  # row tile of each row of the operand
        acc = gl.zeros([64, TOKENS], gl.float32, mma)
        if SHARED and first + steps < all_steps:  # the next program computes the rest of this tile
            while gl.atomic_add(flag + 2, 0, sem="acquire", scope="gpu") == 0:
                pass
            gl.barrier()
            acc = gl.load((partial + 2 * 64 * TOKENS)[:, None] + column)
        a_largest = 0
        b_largest = 0
        if KIND == _INT4:
            acc, at = add_integers(
                acc, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free, at, steps,
                part, GROUP, STAGES,
            )  # fmt: skip
        else:
            if KIND != _NVFP4:
                a_largest = gl.load(second_ptr + row_tile * 64 + lane).to(gl.int32)
                b_largest = gl.load(second_ptr + (row_tile + half) * 64 + lane).to(gl.int32)
            acc, at = add_floats(
                acc, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free, a_largest,
                b_largest, at, steps, part, KIND, STAGES,
            )  # fmt: skip
        if SHARED and first > 0:
            gl.store(partial[:, None] + column, acc)
            gl.barrier()
            gl.atomic_xchg(flag, 1, sem="release", scope="gpu")
        else:
            if KIND == _INT4:
                acc = less_zeros(
                    acc * 512.0, sums, scale_ptr, second_ptr, sum_ptr + token_tile * TOKENS,
                    mine * scales + within, 0 if SHARED else first * EACH,
                    all_steps * EACH if SHARED else steps * EACH, padded, ZERO, TOKENS,
                    STEPS * EACH,
                )  # fmt: skip
            elif KIND == _NVFP4:
                acc *= (8.0 * gl.load(second_ptr + mine * 64 + within))[:, None]
            else:
                a_power = power(gl.maximum(a_largest - 6, 0))
                b_power = power(gl.maximum(b_largest - 6, 0))
                acc *= of_rows(a_power, b_power, mma)[:, None]
            _finish(
                acc, token_scale_ptr, out_ptr, token_tile, row_tile, split, part, tokens, n, GATED,
                TOKENS,
            )  # fmt: skip


@gluon.jit
def _finish(
    acc, token_scale_ptr, out_ptr, token_tile, row_tile, split, part: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, GATED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Stores a tile's sums times the tokens' scales, gated or not."""
    token = token_tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))
    acc *= gl.load(token_scale_ptr + token, mask=token < tokens, other=0.0)[None, :]
    a_sum, b_sum = gl.split(acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    row = row_tile * 64 + part * 32
    if GATED:
        values = gated_sums(a_sum, b_sum, dtype, GATED)
        _store(values.reshape([32, TOKENS]), out_ptr, row, token_tile, tokens, n)
    else:
        out = out_ptr + split.to(gl.int64) * (tokens * n)
        _store(a_sum.to(dtype).reshape([32, TOKENS]), out, row, token_tile, tokens, n)
        _store(b_sum.to(dtype).reshape([32, TOKENS]), out, row + 64, token_tile, tokens, n)


@gluon.jit
def _store(values, out_ptr, row, token_tile, tokens: gl.constexpr, n: gl.constexpr):
    columns: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    values = gl.convert_layout(values, layout)
    row = row + gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None]
    token = token_tile * columns + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < tokens, values)
    gl.store(out_ptr + token * n + row, values, mask=there)


@gluon.jit
def _copy(
    x, packed, scale_ptr, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free, program,
    programs,
    padded: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr,
    TOKENS: gl.constexpr, SPLITS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """The producer warp. Programs that run at the same time read the same few weight rows and all
    tokens."""
    ROWS: gl.constexpr = 128 if KIND == _NVFP4 else 64  # of words, for 64 rows and 128 inputs
    SCALES: gl.constexpr = a_scales.shape[1]
    flat: gl.constexpr = gl.BlockedLayout([2 if SCALES == 64 else 4], [32], [1], [0])
    scale_ptr += gl.arange(0, SCALES, flat)
    all_steps: gl.constexpr = k // 128
    token_tiles: gl.constexpr = padded // TOKENS
    row_tiles: gl.constexpr = n // 64 if GATED else n // 128
    half: gl.constexpr = n // 64 if GATED else 1
    at = 0
    start, stop, by, begin, end = _range(
        program, programs, token_tiles * row_tiles * SPLITS, all_steps, SHARED
    )
    for tile in range(start, stop, by):
        token_tile, row_tile, _, first, steps = _tile(
            tile, begin, end, token_tiles, GATED, SPLITS, STEPS, all_steps, SHARED
        )
        for step in range(first, first + steps):
            stage = at % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, TOKENS * 128 + 2 * 64 * 64)
            a = row_tile * all_steps + step
            tma.async_load(packed, [a * ROWS, 0], bar, a_ring.index(stage))
            b = a + half * all_steps
            tma.async_load(packed, [b * ROWS, 0], bar, b_ring.index(stage))
            async_copy.async_load(a_scales.index(stage), scale_ptr + a * SCALES)
            async_copy.async_load(b_scales.index(stage), scale_ptr + b * SCALES)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            place = [token_tile * TOKENS, step * 128]
            tma.async_load(x, place, bar, x_ring.index(stage))
            at += 1


@gluon.jit
def _product(
    x, packed, token_scale_ptr, sum_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, flag_ptr,
    tokens: gl.constexpr, padded: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, SPLITS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """n: rows of the result; gated, half of the weight's. STEPS: of 128 inputs, of a split."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    ROWS: gl.constexpr = 128 if KIND == _NVFP4 else 64
    WORDS: gl.constexpr = 16 if KIND == _NVFP4 else 32
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], x.layout)
    a_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, ROWS, WORDS], packed.layout)
    b_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, ROWS, WORDS], packed.layout)
    SCALES: gl.constexpr = 64 * (128 // GROUP if KIND == _INT4 else 2 if KIND == _NVFP4 else 1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_type: gl.constexpr = scale_ptr.dtype.element_ty
    a_scales = gl.allocate_shared_memory(scale_type, [STAGES, SCALES], plain)
    b_scales = gl.allocate_shared_memory(scale_type, [STAGES, SCALES], plain)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if KIND == _INT4:
        sum_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, TOKENS], gl.bfloat16)
        sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, TOKENS], sum_layout)
    else:
        sums = ready  # no tokens' sums
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 32)  # the producer's threads copy scales
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                x_ring, a_ring, b_ring, a_scales, b_scales, sums.index(0), ready, free,
                token_scale_ptr, sum_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, flag_ptr,
                program, programs, 0, tokens, padded, n, k, GATED, KIND, GROUP, ZERO, TOKENS,
                SPLITS, STEPS, STAGES, SHARED,
            )),
            (_consume, (
                x_ring, a_ring, b_ring, a_scales, b_scales, sums.index(1), ready, free,
                token_scale_ptr, sum_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, flag_ptr,
                program, programs, 1, tokens, padded, n, k, GATED, KIND, GROUP, ZERO, TOKENS,
                SPLITS, STEPS, STAGES, SHARED,
            )),
            (_copy, (
                x, packed, scale_ptr, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free,
                program, programs, padded, n, k, GATED, KIND, TOKENS, SPLITS, STEPS, STAGES,
                SHARED,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch(
    x: QuantizedTokens,
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
    padded = x.codes.shape[0]
    packed, scale, second = arrays(weight)
    words = packed.shape[-1]
    code_layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * words, element_bitwidth=16, rank=2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tiles = padded // config.tokens * (weight.shape[0] // 128) * config.splits
    programs = min(tiles, target.gpu.multiprocessors)  # one program per multiprocessor
    shared = config.splits == 1 and tiles > programs
    partial = (programs, 2, 64, config.tokens) if shared else (1,)
    return triton_call(
        tensor_descriptor(x.codes, (config.tokens, 128), layout),
        tensor_descriptor(packed.reshape(-1, words), (2048 // words, words), code_layout),
        x.scale, x.sums, scale, second,
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_hopper_{type(weight).__name__}",
        target=target,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct((2 * programs,) if shared else (1,), jnp.int32),
        ),
        zeroed_outputs=(2,) if shared else (),
        together=shared,
        grid=(programs,),
        num_warps=4,
        tokens=tokens, padded=padded, n=out_type.shape[-1], k=k, **kind(weight),
        GATED=gating(activation, gated=gated),
        TOKENS=config.tokens, SPLITS=config.splits, STEPS=-(-(k // 128) // config.splits),
        STAGES=config.num_stages, SHARED=shared,
    )[0]  # fmt: skip
