"""Products of many tokens with their experts on Hopper: rows of a weight are the left operand.

A program walks over tiles of 256 rows of an expert's weight (gate beside up, or 256 of down) and up
to 160 of its tokens, so that most experts of 128 tokens are one tile, and their weights are read
once. A producer copies both into rings in shared memory, also while the tile before is being
stored; each of two warpgroups multiplies half of the rows. Gate and up gather their tokens. Hidden
tokens lie in their experts' order, so that a tile of down is a block of rows; those past an
expert's end are the next one's, and are multiplied for nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import most_blocks
from jaxserve_kernels.experts.hopper_rows_copy import (
    BOX,
    DEPTH,
    MAIN,
    ROWS,
    STAGES,
    block_at,
    copy,
)
from jaxserve_kernels.experts.types import (
    SWIGLU_OSS_ALPHA,
    SWIGLU_OSS_LIMIT,
    ExpertActivation,
    ExpertWeights,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

TOKENS = MAIN + BOX
"""Of a tile, at most."""
_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
_BOXES = gl.constexpr(MAIN // BOX)
_DEPTH = gl.constexpr(DEPTH)
_ROWS = gl.constexpr(ROWS)
_HALF = gl.constexpr(ROWS // 2)
"""Rows of a warpgroup, of either half of a tile."""
_STAGES = gl.constexpr(STAGES)
_PLAIN = gl.constexpr(0)
_OSS = gl.constexpr(3)
_ALPHA = gl.constexpr(SWIGLU_OSS_ALPHA)
_LIMIT = gl.constexpr(SWIGLU_OSS_LIMIT)


@triton.jit
def _blocks(
    ends_ptr, block_ptr,
    experts: tl.constexpr, count: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Of each block its expert, and where its tokens begin and end; and how many blocks there are.
    An expert's blocks have as many tokens each, but for rounding."""
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    there = lane < experts
    ends = tl.load(ends_ptr + lane, mask=there, other=0)
    begins = tl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
    tokens = tl.where(there, ends - begins, 0)
    blocks = (tokens + TOKENS - 1) // TOKENS
    last = tl.cumsum(blocks, axis=0)
    expert = tl.sum((last <= block).to(tl.int32), axis=0)
    each = (tokens + blocks - 1) // tl.maximum(blocks, 1)
    begin = begins + (block - last + blocks) * each
    mine = lane == expert
    at = block_ptr + block
    tl.store(at, expert)
    tl.store(at + count, tl.sum(tl.where(mine, begin, 0), axis=0))
    tl.store(at + 2 * count, tl.sum(tl.where(mine, tl.minimum(begin + each, ends), 0), axis=0))
    tl.store(at + 3 * count, tl.sum(blocks, axis=0))


@gluon.jit
def _gated(gate, up, GATED: gl.constexpr):
    """`reference.swiglu_oss`, or `gated_sums`: in float32."""
    if GATED == _OSS:
        gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), _LIMIT)
        up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -_LIMIT), _LIMIT)
        out = (up + 1.0) * gate / (1.0 + gl.exp(gate * -_ALPHA))
    else:
        out = gated_sums(gate, up, gl.bfloat16, GATED)
    return out


@gluon.jit
def _places(
    order_ptr, weights_ptr, first, end, tokens, choices: gl.constexpr,
    TOKENS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Rows of the result of the pairs from `first` on, -1 past the last; of down by choice and
    token, and by what each result is multiplied."""
    place = first + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [4], [0]))
    there = place < end
    factor = 1.0
    row = place
    if GATED == _PLAIN:
        pair = gl.load(order_ptr + place, mask=there, other=0)
        factor = gl.load(weights_ptr + pair, mask=there, other=0.0)
        row = (pair % choices) * tokens + pair // choices
    return gl.where(there, row, -1), factor


@gluon.jit
def _store(values, out_ptr, rows, column, n: gl.constexpr):
    """Values [columns, tokens] to the tokens' rows."""
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = gl.convert_layout(values.to(gl.bfloat16), flat)
    rows = gl.convert_layout(rows, gl.SliceLayout(0, flat))
    columns = column + gl.arange(0, _HALF, gl.SliceLayout(1, flat))
    mask = gl.expand_dims(rows >= 0, 0) & gl.expand_dims(columns < n, 1)
    at = gl.expand_dims(rows.to(gl.int64), 0) * n + gl.expand_dims(columns, 1)
    gl.store(out_ptr + at, out, mask=mask)


@gluon.jit
def _finish(
    left, right, out_ptr, places, column, second: gl.constexpr,
    n: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Sums [_HALF, tokens] of either half of a tile to memory."""
    if GATED == _PLAIN:
        factor = gl.convert_layout(places[1], gl.SliceLayout(0, left.type.layout))
        factor = gl.expand_dims(factor, 0)
        _store(left * factor, out_ptr, places[0], column, n)
        _store(right * factor, out_ptr, places[0], column + second, n)
    else:
        _store(_gated(left, right, GATED), out_ptr, places[0], column, n)


@gluon.jit
def _biased(acc, bias_ptr, column, n: gl.constexpr):
    columns = column + gl.arange(0, _HALF, gl.SliceLayout(1, acc.type.layout))
    bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 1)


@gluon.jit
def _halves(values):
    """Of the tokens: the first and the other."""
    tokens: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape([_HALF, 2, tokens]).permute((0, 2, 1)))


@gluon.jit
def _multiply_tile(
    part: gl.constexpr,
    x_ring, t_ring, w_ring, ready, free, bias_ptr, order_ptr, weights_ptr, out_ptr, at,
    begin, end, column, tokens, second: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Warpgroup `part`: its 64 rows of either half of a tile, from step `at` of the rings on; the
    step after it. The other half is `second` behind the first. TAIL: the tile has a box more."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MAIN, 16])
    short: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BOX, 16])
    left = gl.zeros([_HALF, _MAIN], gl.float32, layout)
    right = gl.zeros([_HALF, _MAIN], gl.float32, layout)
    short_left = gl.zeros([_HALF, _BOX], gl.float32, short)
    short_right = gl.zeros([_HALF, _BOX], gl.float32, short)
    QUARTER: gl.constexpr = _MAIN // 2
    first = _places(order_ptr, weights_ptr, begin, end, tokens, choices, QUARTER, GATED)
    then = _places(order_ptr, weights_ptr, begin + QUARTER, end, tokens, choices, QUARTER, GATED)
    last = first
    if TAIL:
        last = _places(order_ptr, weights_ptr, begin + _MAIN, end, tokens, choices, _BOX, GATED)
    for step in range(k // _DEPTH):
        stage = at % _STAGES
        mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
        x = x_ring.index(stage).permute((1, 0))
        w_left = w_ring.index(stage).slice(part * _HALF, _HALF, dim=0)
        w_right = w_ring.index(stage).slice(_ROWS + part * _HALF, _HALF, dim=0)
        left = warpgroup_mma(w_left, x, left, is_async=True)
        right = warpgroup_mma(w_right, x, right, is_async=True)
        if TAIL:
            x = t_ring.index(stage).permute((1, 0))
            short_left = warpgroup_mma(w_left, x, short_left, is_async=True)
            short_right = warpgroup_mma(w_right, x, short_right, is_async=True)
            left, right, short_left, short_right = warpgroup_mma_wait(
                4, deps=[left, right, short_left, short_right]
            )
        else:
            left, right = warpgroup_mma_wait(2, deps=[left, right])
        # The products of the step before this one are done, and its place free.
        mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
        at += 1
    if TAIL:
        left, right, short_left, short_right = warpgroup_mma_wait(
            0, deps=[left, right, short_left, short_right]
        )
    else:
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1)
    column += part * _HALF
    if BIAS:
        bound: gl.constexpr = n if GATED == _PLAIN else n + second
        left = _biased(left, bias_ptr, column, n)
        right = _biased(right, bias_ptr, column + second, bound)
        if TAIL:
            short_left = _biased(short_left, bias_ptr, column, n)
            short_right = _biased(short_right, bias_ptr, column + second, bound)
    if TAIL:
        _finish(short_left, short_right, out_ptr, last, column, second, n, GATED)
    left_first, left_then = _halves(left)
    right_first, right_then = _halves(right)
    _finish(left_first, right_first, out_ptr, first, column, second, n, GATED)
    _finish(left_then, right_then, out_ptr, then, column, second, n, GATED)
    return at


@gluon.jit
def _multiply(
    part: gl.constexpr,
    x_ring, t_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr, weights_ptr, out_ptr,
    tokens,
    count: gl.constexpr, columns: gl.constexpr,
    step: gl.constexpr, second: gl.constexpr, rows: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    at = 0
    tiles = gl.load(block_ptr + 3 * count) * columns
    expert, begin, end = block_at(block_ptr, gl.program_id(0), count, columns)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Read while this tile is multiplied.
        later = block_at(block_ptr, tile + gl.num_programs(0), count, columns)
        if end - begin > _MAIN:
            at = _multiply_tile(
                part, x_ring, t_ring, w_ring, ready, free, bias_ptr + expert * rows, order_ptr,
                weights_ptr, out_ptr, at, begin, end, tile % columns * step, tokens, second,
                n, k, choices, BIAS, GATED, True,
            )  # fmt: skip
        else:
            at = _multiply_tile(
                part, x_ring, t_ring, w_ring, ready, free, bias_ptr + expert * rows, order_ptr,
                weights_ptr, out_ptr, at, begin, end, tile % columns * step, tokens, second,
                n, k, choices, BIAS, GATED, False,
            )  # fmt: skip
        expert, begin, end = later


@gluon.jit
def _program(
    x, w, bias_ptr, block_ptr, order_ptr, weights_ptr, tokens, out_ptr,
    count: gl.constexpr, columns: gl.constexpr,
    step: gl.constexpr, second: gl.constexpr, rows: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    gather: gl.constexpr = GATED != _PLAIN
    boxes = gl.allocate_shared_memory(gl.bfloat16, [_STAGES * _BOXES, _BOX, _DEPTH], w.layout)
    t_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BOX, _DEPTH], w.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 2 * _ROWS, _DEPTH], w.layout)
    x_ring = boxes.reinterpret(gl.bfloat16, [_STAGES, _MAIN, _DEPTH], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=2 if gather else 1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, x_ring, t_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr,
                weights_ptr, out_ptr, tokens, count, columns, step, second, rows, n, k, choices,
                BIAS, GATED,
            )),
            (_multiply, (
                1, x_ring, t_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr,
                weights_ptr, out_ptr, tokens, count, columns, step, second, rows, n, k, choices,
                BIAS, GATED,
            )),
            (copy, (
                x, w, boxes, t_ring, w_ring, ready, free, block_ptr, order_ptr,
                count, columns, step, second, rows, k, choices, gather,
            )),
        ],
        [4, 4 if gather else 1],
        [232, 40 if gather else 24],
    )  # fmt: skip


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    *,
    target: Target,
) -> Array:
    """See `reference.experts`: a part for each choice of a token's, rounded. Inputs of both
    weights are multiples of DEPTH."""
    tokens, embed = x.shape
    count = w.gate_up.shape[0]
    order, ends = triton_route.order(ids, count, target=target)
    most = most_blocks(ids, count, TOKENS)
    blocks = triton_call(
        ends,
        kernel=_blocks,
        name="expert_blocks",
        target=target,
        out_type=jax.ShapeDtypeStruct((4, most), jnp.int32),
        grid=(most,),
        num_warps=1,
        experts=count, count=most, TOKENS=TOKENS, EXPERTS=triton.next_power_of_2(count),
    )  # fmt: skip
    gated = _OSS.value if activation == "swiglu_oss" else gating(activation)
    lists = blocks, order, weights, tokens
    hidden = _product(x, w.gate_up, w.gate_up_bias, ids, lists, w.width, gated, target)
    parts = _product(hidden, w.down, w.down_bias, ids, lists, embed, _PLAIN.value, target)
    return parts.reshape(ids.shape[1], tokens, embed)


def _product(
    x: Array,
    weight: Array,
    bias: Array | None,
    ids: Array,
    lists: tuple[Any, ...],
    n: int,
    gated: int,
    target: Target,
) -> Array:
    """[pairs, n]: gated, of tokens x, in the experts' order; else of hidden ones in that order, by
    choice and token."""
    count, rows, k = weight.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    step = ROWS if gated else 2 * ROWS
    columns = triton.cdiv(n, step)
    blocks, order, weights, tokens = lists
    return triton_call(
        x if gated else tensor_descriptor(x, (BOX, DEPTH), layout),
        tensor_descriptor(weight.reshape(count * rows, k), (ROWS, DEPTH), layout),
        weights if bias is None else bias, blocks, order, weights, tokens,
        kernel=_program,
        name=f"experts_{'gate_up' if gated else 'down'}_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size, n), x.dtype),
        grid=(min(target.gpu.multiprocessors, blocks.shape[1] * columns),),
        num_warps=4,
        count=blocks.shape[1], columns=columns, step=step,
        second=n if gated else ROWS, rows=rows, n=n, k=k, choices=ids.shape[1],
        BIAS=bias is not None, GATED=gated,
    )  # fmt: skip
