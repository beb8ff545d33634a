"""Products of many tokens with fp8 weights on Hopper: one warp copies tiles while others multiply.

A program walks over tiles of 128 tokens by up to 256 weight rows. A producer warp copies tokens and
codes into a ring in shared memory (TMA), even while the previous tile is being stored. Two
warpgroups of 64 tokens each multiply. In a gated product a tile has the same number of rows of gate
and of up, so a warpgroup has both products of a token in its registers.

If the last wave has few tiles, they are cut into pieces that all programs share. If there are few
tiles in all, programs split the inputs of a tile and store partial sums.
"""

from __future__ import annotations

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.dense_matmul.hopper import divide
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import arrays
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Quantized

TOKENS = 128
DEPTH = 128
_TOKENS = gl.constexpr(TOKENS)
_DEPTH = gl.constexpr(DEPTH)


@gluon.jit
def place_of(tile, tokens, COLUMNS: gl.constexpr, SPLITS: gl.constexpr, k: gl.constexpr):
    """A tile's first token and column, its split, its first step and number of steps."""
    token_tiles = (tokens + _TOKENS - 1) // _TOKENS
    all_steps: gl.constexpr = k // _DEPTH
    each: gl.constexpr = (all_steps + SPLITS - 1) // SPLITS
    split = tile // token_tiles % SPLITS
    token = tile % token_tiles * _TOKENS
    column = tile // (token_tiles * SPLITS) * COLUMNS
    return token, column, split, split * each, gl.minimum(each, all_steps - split * each)


@gluon.jit
def _multiply_tile(
    x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr, out_ptr, at, token, column, steps,
    tokens, part: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
    n: gl.constexpr,
):  # fmt: skip
    """Multiplies the 64 tokens of warpgroup `part` in a tile of ROWS rows. Starts at step `at` of
    the ring, and returns the step after the tile."""
    MINE: gl.constexpr = _TOKENS // 2
    HALF: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    whole: gl.constexpr = w_ring.shape[1]
    by_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    acc = gl.zeros([MINE, ROWS], gl.float32, layout)
    for step in range(steps):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        x = x_ring.index(stage).slice(part * MINE, MINE, dim=0)
        w = w_ring.index(stage).reinterpret(gl.float8e4nv, [whole, _DEPTH], by_bytes)
        w = w.slice(0, ROWS, dim=0)
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The previous product is done, so its ring stage is free.
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    token = token + part * MINE
    row = token + gl.arange(0, MINE, gl.SliceLayout(1, layout))
    acc *= gl.load(token_scale_ptr + row, mask=row < tokens, other=0.0)[:, None]
    each = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    each = column + each % HALF + each // HALF * (n if GATED else HALF)
    acc *= gl.load(scale_ptr + each)[None, :]
    first, second = gl.split(acc.reshape([MINE, 2, HALF]).permute((0, 2, 1)))
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        _store(gated_sums(first, second, dtype, GATED), out_ptr, token, column, tokens, n)
    else:
        _store(first, out_ptr, token, column, tokens, n)
        _store(second, out_ptr, token, column + HALF, tokens, n)
    return at


@gluon.jit
def _store(values, out_ptr, token, column, tokens, n: gl.constexpr):
    ROWS: gl.constexpr = values.shape[0]
    COLUMNS: gl.constexpr = values.shape[1]
    if COLUMNS > 64 and out_ptr.dtype.element_ty == gl.float32:  # saves conversion memory
        first, second = gl.split(values.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
        _store(first, out_ptr, token, column, tokens, n)
        _store(second, out_ptr, token, column + COLUMNS // 2, tokens, n)
    else:
        flat: gl.constexpr = gl.BlockedLayout(
            [1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0]
        )
        values = gl.convert_layout(values.to(out_ptr.dtype.element_ty), flat)
        row = gl.expand_dims(token + gl.arange(0, ROWS, gl.SliceLayout(1, flat)), 1)
        column = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, flat)), 0)
        gl.store(out_ptr + row * n + column, values, mask=row < tokens)


@gluon.jit
def multiply_tiles(
    x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr, out_ptr, program, programs, tokens,
    tiles, whole, part: gl.constexpr, pieces: gl.constexpr, ROWS: gl.constexpr,
    GATED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """Multiplies the 64 tokens of warpgroup `part` in each tile of this program."""
    COLUMNS: gl.constexpr = ROWS // 2 if GATED else ROWS
    at = 0
    for tile in range(program, whole, programs):
        token, column, split, _, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        at = _multiply_tile(
            x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr,
            out_ptr + split.to(gl.int64) * (tokens * n), at, token, column, steps, tokens, part,
            ROWS, GATED, STAGES, n,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < tiles:
        token, column, split, _, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        _multiply_tile(
            x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr,
            out_ptr + split.to(gl.int64) * (tokens * n), at, token,
            column + program % pieces * (COLUMNS // pieces), steps, tokens, part, ROWS // pieces,
            GATED, STAGES, n,
        )  # fmt: skip


@gluon.jit
def _copy_tile(
    x, w, x_ring, w_ring, ready, free, at, token, column, first_step, steps,
    ROWS: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """Copies the operands of a tile. The weight is stored in tiles of 64 rows by 128 inputs."""
    for step in range(first_step, first_step + steps):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (_TOKENS + ROWS) * _DEPTH)
        tma.async_load(x, [token, step * _DEPTH], bar, x_ring.index(stage))
        for tile in gl.static_range(ROWS // 64):
            if GATED and tile >= ROWS // 128:
                first = (n + column) // 64 + tile - ROWS // 128
            else:
                first = column // 64 + tile
            place = w_ring.index(stage).slice(64 * tile, 64, dim=0)
            tma.async_load(w, [(first * (k // _DEPTH) + step) * 64, 0], bar, place)
        at += 1
    return at


@gluon.jit
def _copy(
    x, w, x_ring, w_ring, ready, free, program, programs, tokens, tiles, whole,
    pieces: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """The producer warp. Programs that run at the same time read the same few weight rows and all
    tokens."""
    COLUMNS: gl.constexpr = ROWS // 2 if GATED else ROWS
    at = 0
    for tile in range(program, whole, programs):
        token, column, _, first, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        at = _copy_tile(
            x, w, x_ring, w_ring, ready, free, at, token, column, first, steps, ROWS, GATED, STAGES,
            n, k,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < tiles:
        token, column, _, first, steps = place_of(tile, tokens, COLUMNS, SPLITS, k)
        _copy_tile(
            x, w, x_ring, w_ring, ready, free, at, token,
            column + program % pieces * (COLUMNS // pieces), first, steps, ROWS // pieces, GATED,
            STAGES, n, k,
        )  # fmt: skip


@gluon.jit
def _product(
    x, w, token_scale_ptr, scale_ptr, tokens, tiles, whole, out_ptr,
    pieces: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """n: columns of the result; gated, half of the weight's rows. The number of tokens is not a
    constant: otherwise the steps of each bucket would compile their own kernels."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _TOKENS, _DEPTH], x.layout)
    w_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, ROWS, _DEPTH // 2], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr, out_ptr, program, programs,
                tokens, tiles, whole, 0, pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
            (multiply_tiles, (
                x_ring, w_ring, ready, free, token_scale_ptr, scale_ptr, out_ptr, program, programs,
                tokens, tiles, whole, 1, pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
            (_copy, (
                x, w, x_ring, w_ring, ready, free, program, programs, tokens, tiles, whole,
                pieces, ROWS, GATED, SPLITS, STAGES, n, k,
            )),
        ],
        [4, 1],
        [232, 24],
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
    out = weight.shape[0]
    packed, scale, _ = arrays(weight)
    words = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    codes = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tiles = -(-tokens // TOKENS) * (out // config.rows) * config.splits
    narrowest = 128 if gated else 64  # rows: the weight is stored in tiles of 64
    whole, pieces = divide(
        tiles, target.gpu.multiprocessors, min(config.pieces, config.rows // narrowest)
    )
    programs = target.gpu.multiprocessors if whole else tiles * pieces
    return triton_call(
        tensor_descriptor(x.codes, (TOKENS, DEPTH), codes),
        tensor_descriptor(packed.reshape(-1, DEPTH // 2), (64, DEPTH // 2), words),
        x.scale, scale, tokens, tiles, whole,
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_hopper_bytes",
        target=target,
        out_type=out_type,
        grid=(programs,),
        num_warps=4,
        pieces=pieces, ROWS=config.rows, SPLITS=config.splits, STAGES=config.num_stages,
        GATED=gating(activation, gated=gated), n=out_type.shape[-1], k=k,
    )  # fmt: skip
