"""Gated products of many tokens on Hopper. The gating runs in registers, which hold both products.

XLA would write the product with gate and up to memory, 76 KB per token of a 4B model, for another
kernel to read. Here a program walks over tiles of 128 tokens by 128 columns of the result. A
producer warp copies the tokens, the gate rows and the up rows into a ring in shared memory (TMA),
even while the previous tile is being stored. Two warpgroups of 64 tokens each multiply. If the last
wave has few tiles, they are cut into pieces that all programs share.
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
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

TOKENS = 128
COLUMNS = 128
DEPTH = 64
_TOKENS = gl.constexpr(TOKENS)
_COLUMNS = gl.constexpr(COLUMNS)
_DEPTH = gl.constexpr(DEPTH)
_STAGES = gl.constexpr(4)
"""Ring stages of 48 KB each: as many as shared memory holds."""

_MOST_PIECES = 2
"""The most pieces of a tile. Four are no faster on an H200; see lab/logs/prefill.md."""


@gluon.jit
def _multiply_tile(
    x_ring, w_ring, ready, free, out_ptr, at, token, column,
    part: gl.constexpr, COLUMNS: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Multiplies the 64 tokens of warpgroup `part` in a tile of COLUMNS columns. Starts at step
    `at` of the ring, and returns the step after the tile."""
    ROWS: gl.constexpr = _TOKENS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    acc = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, layout)
    for step in range(k // _DEPTH):
        stage = at % _STAGES
        mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
        x = x_ring.index(stage).slice(part * ROWS, ROWS, dim=0)
        w = w_ring.index(stage).slice(0, 2 * COLUMNS, dim=0)
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The previous product is done, so its ring stage is free.
        mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1)
    gate, up = gl.split(acc.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
    out = gated_sums(gate, up, gl.bfloat16, GATED)
    out = gl.convert_layout(out, flat)
    row = token + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    row = gl.expand_dims(row, 1)
    column = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, flat)), 0)
    gl.store(out_ptr + row * n + column, out, mask=row < tokens)
    return at


@gluon.jit
def _multiply(
    x_ring, w_ring, ready, free, out_ptr, program, programs,
    part: gl.constexpr, whole: gl.constexpr, pieces: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Multiplies the 64 tokens of warpgroup `part` in each tile of this program."""
    rows: gl.constexpr = (tokens + _TOKENS - 1) // _TOKENS
    at = 0
    for tile in range(program, whole, programs):
        at = _multiply_tile(
            x_ring, w_ring, ready, free, out_ptr, at,
            tile % rows * _TOKENS, tile // rows * _COLUMNS, part, _COLUMNS, tokens, n, k, GATED,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < rows * (n // _COLUMNS):
        WIDTH: gl.constexpr = _COLUMNS // pieces
        column = tile // rows * _COLUMNS + program % pieces * WIDTH
        _multiply_tile(
            x_ring, w_ring, ready, free, out_ptr, at,
            tile % rows * _TOKENS, column, part, WIDTH, tokens, n, k, GATED,
        )  # fmt: skip


@gluon.jit
def _copy_tile(
    x, w, x_ring, w_ring, ready, free, at, token, column,
    COLUMNS: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    for depth in range(0, k, _DEPTH):
        stage = at % _STAGES
        bar = ready.index(stage)
        gate = w_ring.index(stage).slice(0, COLUMNS, dim=0)
        up = w_ring.index(stage).slice(COLUMNS, COLUMNS, dim=0)
        mbarrier.wait(free.index(stage), ((at // _STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (_TOKENS + 2 * COLUMNS) * _DEPTH * 2)
        tma.async_load(x, [token, depth], bar, x_ring.index(stage))
        tma.async_load(w, [column, depth], bar, gate)
        tma.async_load(w, [n + column, depth], bar, up)
        at += 1
    return at


@gluon.jit
def _copy(
    x, w, w_piece, x_ring, w_ring, ready, free, program, programs,
    whole: gl.constexpr, pieces: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """The producer warp. Programs that run at the same time read the same few weight rows and all
    tokens."""
    rows: gl.constexpr = (tokens + _TOKENS - 1) // _TOKENS
    at = 0
    for tile in range(program, whole, programs):
        at = _copy_tile(
            x, w, x_ring, w_ring, ready, free, at,
            tile % rows * _TOKENS, tile // rows * _COLUMNS, _COLUMNS, n, k,
        )  # fmt: skip
    tile = whole + program // pieces
    if tile < rows * (n // _COLUMNS):
        WIDTH: gl.constexpr = _COLUMNS // pieces
        column = tile // rows * _COLUMNS + program % pieces * WIDTH
        _copy_tile(
            x, w_piece, x_ring, w_ring, ready, free, at, tile % rows * _TOKENS, column, WIDTH, n, k
        )


@gluon.jit
def _program(
    x, w, w_piece, out_ptr, whole: gl.constexpr, pieces: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _TOKENS, _DEPTH], x.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 2 * _COLUMNS, _DEPTH], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_ring, w_ring, ready, free, out_ptr, program, programs,
                0, whole, pieces, tokens, n, k, GATED,
            )),
            (_multiply, (
                x_ring, w_ring, ready, free, out_ptr, program, programs,
                1, whole, pieces, tokens, n, k, GATED,
            )),
            (_copy, (
                x, w, w_piece, x_ring, w_ring, ready, free, program, programs,
                whole, pieces, tokens, n, k,
            )),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def divide(tiles: int, programs: int, most_pieces: int = _MOST_PIECES) -> tuple[int, int]:
    """The number of tiles that are multiplied whole, and the number of pieces, a power of two, into
    which each other tile is cut."""
    rest = tiles % programs
    pieces = most_pieces
    while pieces > 1 and rest * pieces > programs:
        pieces //= 2
    return tiles - rest, pieces


def gated_linear(
    x: Array, weight: Array, activation: Activation = "silu", *, target: Target
) -> Array:
    """See `reference.gated_linear`: [tokens, ffn] in bfloat16. ffn is a multiple of COLUMNS, and
    the number of inputs one of DEPTH."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = -(-tokens // TOKENS) * (n // COLUMNS)
    programs = min(tiles, target.gpu.multiprocessors)
    whole, pieces = divide(tiles, programs)
    return triton_call(
        tensor_descriptor(x, (TOKENS, DEPTH), layout),
        tensor_descriptor(weight, (COLUMNS, DEPTH), layout),
        tensor_descriptor(weight, (COLUMNS // pieces, DEPTH), layout),
        kernel=_program,
        name="gated_linear_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens, n), x.dtype),
        grid=(programs,),
        num_warps=4,
        whole=whole, pieces=pieces, tokens=tokens, n=n, k=k, GATED=gating(activation),
    )  # fmt: skip
