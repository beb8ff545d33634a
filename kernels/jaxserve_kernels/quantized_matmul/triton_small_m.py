"""Products of up to eight tokens with 4-bit integers: bound by the latency and rate of loading
codes.

A program takes 16 rows of the weight, and each of its warps takes other input tiles. A thread loads
all its codes at once into registers. The tensor cores' smallest product (16 rows by 8 tokens) reads
them there without reordering: the layout permutes the inputs, and tokens are loaded in the same
permutation. The program adds its warps' sums, so that the result has few parts for its reader.
"""

from __future__ import annotations

import jax
import triton
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_unpack import less_zero, nibbles
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight

_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.jit
def _tile_and_row(
    program, first, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Returns each warp's first tile [WARPS, 1], and the weight rows [1, ROWS]. Gated, these are
    gate rows, then up rows."""
    tile = first + gl.arange(0, WARPS, gl.SliceLayout(1, layout))
    lane = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    row = program * ROWS + lane
    if GATED:
        half: gl.constexpr = ROWS // 2
        row = program * half + lane % half + lane // half * n
    return tile[:, None], row[None, :]


@gluon.jit
def _load(at, tile, tiles: gl.constexpr, EVEN: gl.constexpr):
    """Loads from the warps' tiles, zeros past the last one. EVEN: no tile is past the last one."""
    if EVEN:
        values = gl.load(at)
    else:
        there, _ = gl.broadcast(tile < tiles, at)
        values = gl.load(at, mask=there, other=0)
    return values


@gluon.jit
def _load_tiles(
    pointer, tile, stride: gl.constexpr, tiles: gl.constexpr,
    STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Loads the elements at `pointer` for the tiles of all steps. Tiles are `stride` apart."""
    values = ()
    for step in gl.static_range(STEPS):
        at = pointer + step * (WARPS * stride)
        values += (_load(at, tile + step * WARPS, tiles, tiles % (STEPS * WARPS) == 0),)
    return values


@gluon.jit
def _copy_tiles(
    pointer, tile, stride: gl.constexpr, tiles: gl.constexpr,
    STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """`_load_tiles` as asynchronous copies into shared memory."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    places = ()
    for step in gl.static_range(STEPS):
        place = gl.allocate_shared_memory(pointer.dtype.element_ty, pointer.shape, layout)
        at = pointer + step * (WARPS * stride)
        if tiles % (STEPS * WARPS) == 0:
            async_copy.async_load(place, at)
        else:
            there, _ = gl.broadcast(tile + step * WARPS < tiles, at)
            async_copy.async_load(place, at, mask=there)
        places += (place,)
    async_copy.commit_group()
    return places


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """n: rows of the result; gated, half of the weight's. GROUP: inputs per scale, 32, 64 or
    128."""
    tiles: gl.constexpr = k // 128
    groups: gl.constexpr = 128 // GROUP
    shared: gl.constexpr = 4 // groups  # planes of 32 inputs that share a scale
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    program = gl.program_id(0)
    first = gl.program_id(1) * (STEPS * WARPS)

    tile, row = _tile_and_row(program, first, n, GATED, ROWS, WARPS, gl.SliceLayout(2, left))
    block = (row // 64).to(gl.int64) * tiles + tile
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    source = packed_ptr + (block * 2048 + row % 64 * 32)[:, :, None] + word
    codes = _load_tiles(source, tile[:, :, None], 2048, tiles, STEPS, WARPS)
    zeros = ()
    if ZERO != _NO_ZERO:
        for group in gl.static_range(groups):
            source = zero_ptr + (block * groups + group) * 64 + row % 64
            zeros += (_load_tiles(source, tile, 64 * groups, tiles, STEPS, WARPS),)
    tile, row = _tile_and_row(program, first, n, GATED, ROWS, WARPS, gl.SliceLayout(2, mma))
    block = (row // 64).to(gl.int64) * tiles + tile
    scales = ()
    for group in gl.static_range(groups):
        source = scale_ptr + (block * groups + group) * 64 + row % 64
        scales += (_load_tiles(source, tile, 64 * groups, tiles, STEPS, WARPS),)
    if tokens == 1:
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        tile = first + gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
        source = x_ptr + tile * 128 + gl.arange(0, 128, gl.SliceLayout(0, flat))[None, :]
        inputs = _copy_tiles(source, tile, 128, tiles, STEPS, WARPS)
        async_copy.wait_group(0)
    # Without the barrier ptxas moves some loads of codes after the use of others.
    gl.barrier()

    tile = first + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    x_at = x_ptr + gl.minimum(token, tokens - 1) * k + tile * 128 + lane
    nothing = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, mma)
    acc = nothing
    for step in gl.static_range(STEPS):
        planes = nibbles(codes[step])
        part = nothing
        for plane in gl.static_range(4):
            if tokens == 1:
                x = inputs[step].slice(plane * 32, 32, dim=1).load(gl.SliceLayout(2, right))
                x, _ = gl.broadcast(gl.expand_dims(x, 2), token)
            else:
                at = x_at + step * (WARPS * 128) + plane * 32
                x = _load(at, tile + step * WARPS, tiles, tiles % (STEPS * WARPS) == 0)
            zero = zeros[plane // shared][step] if ZERO != _NO_ZERO else 0
            part = mma_v2(less_zero(planes[plane], zero, plane, ZERO), x, part)
            if plane % shared == shared - 1:
                acc += part * scales[plane // shared][step][:, :, None]
                part = nothing
    sums = gl.sum(acc, 0) * 64.0  # less_zero

    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        half: gl.constexpr = ROWS // 2
        gate, up = gl.split(sums.reshape([2, half, TOKENS]).permute((1, 2, 0)))
        values = gated_sums(gate, up, dtype, GATED)
        by_row: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
        _store(gl.convert_layout(values, by_row), out_ptr, tokens, n, half, TOKENS, by_row)
    else:
        by_sum: gl.constexpr = gl.SliceLayout(0, mma)
        out_ptr += gl.program_id(1) * (tokens * n)
        _store(sums.to(dtype), out_ptr, tokens, n, ROWS, TOKENS, by_sum)


@gluon.jit
def _store(
    values, out_ptr, tokens: gl.constexpr, n: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < tokens, values)
    gl.store(out_ptr + token * n + row, values, mask=there)


def launch(
    x: Array,
    weight: Int4Weight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    return triton_call(
        x, *arrays(weight),
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_small_m_{type(weight).__name__}",
        target=target,
        out_type=out_type,
        grid=(weight.shape[0] // config.rows, config.splits),
        num_warps=config.num_warps,
        tokens=tokens, n=out_type.shape[-1], k=k, **kind(weight),
        GATED=gating(activation, gated=gated),
        TOKENS=config.tokens, ROWS=config.rows,
        STEPS=triton.cdiv(k // 128, config.num_warps * config.splits), WARPS=config.num_warps,
    )  # fmt: skip
