"""Products of many tokens with their experts on Hopper, as `dense_matmul/hopper.py` has them.

A program walks over tiles of up to 128 tokens of one expert and 256 rows of its weight: gate beside
up, or 256 of down. A producer copies both into a ring in shared memory, also while the tile before
is being stored; two warpgroups of 64 tokens each multiply. Gate and up gather their tokens, and a
warpgroup that has none passes by. Hidden tokens lie in their experts' order, so that a tile of down
is a block of rows; those past an expert's end are the next one's, and are multiplied for nothing.
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
from jaxserve_kernels.experts.hopper_copy import COLUMNS, DEPTH, ROWS, STAGES, block_at, copy
from jaxserve_kernels.experts.triton import block_of
from jaxserve_kernels.experts.types import (
    SWIGLU_OSS_ALPHA,
    SWIGLU_OSS_LIMIT,
    ExpertActivation,
    ExpertWeights,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

TOKENS = 2 * ROWS
"""Of a tile."""
_COLUMNS = gl.constexpr(COLUMNS)
_DEPTH = gl.constexpr(DEPTH)
_ROWS = gl.constexpr(ROWS)
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
    """Of each block its expert, and where its tokens begin and end; an expert beyond the last: it
    has none."""
    expert, begin, end = block_of(ends_ptr, ends_ptr, experts, False, TOKENS, EXPERTS)
    at = block_ptr + tl.program_id(1)
    tl.store(at, expert)
    tl.store(at + count, begin)
    tl.store(at + 2 * count, end)


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
def _store(
    values, order_ptr, out_ptr, first, end, column, tokens,
    n: gl.constexpr, choices: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Values [_ROWS, _COLUMNS] of the pairs from `first` on: where they lie, or to each pair's own
    row."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    out = gl.convert_layout(values.to(gl.bfloat16), flat)
    place = first + gl.arange(0, _ROWS, gl.SliceLayout(1, flat))
    row = place
    if GATED == _PLAIN:
        pair = gl.load(order_ptr + place, mask=place < end, other=0)
        row = (pair % choices) * tokens + pair // choices
    columns = gl.expand_dims(column + gl.arange(0, _COLUMNS, gl.SliceLayout(0, flat)), 0)
    mask = gl.expand_dims(place < end, 1) & (columns < n)
    gl.store(out_ptr + gl.expand_dims(row.to(gl.int64), 1) * n + columns, out, mask=mask)


@gluon.jit
def _factors(order_ptr, weights_ptr, first, end, layout: gl.constexpr):
    """By which the results of the pairs from `first` on are multiplied."""
    place = first + gl.arange(0, _ROWS, layout)
    pair = gl.load(order_ptr + place, mask=place < end, other=0)
    return gl.load(weights_ptr + pair, mask=place < end, other=0.0)


@gluon.jit
def _multiply_tile(
    part: gl.constexpr,
    x_ring, w_ring, ready, free, bias_ptr, order_ptr, weights_ptr, out_ptr, at,
    begin, end, column, tokens, second: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Warpgroup `part`: its 64 tokens of a tile, from step `at` of the ring on; the step after it.
    The tile's other columns are `second` behind the first."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS, 16])
    acc = gl.zeros([_ROWS, 2 * _COLUMNS], gl.float32, layout)
    first = begin + part * _ROWS
    if GATED == _PLAIN:
        factor = _factors(order_ptr, weights_ptr, first, end, gl.SliceLayout(1, layout))
    for step in range(k // _DEPTH):
        stage = at % _STAGES
        mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
        if GATED == _PLAIN:
            x = x_ring.index(stage).slice(part * _ROWS, _ROWS, dim=0)
        else:
            x = x_ring.index(stage * 2 + part)
        acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The product before this one is done, and its place free.
        mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1)
    if BIAS:
        lane = gl.arange(0, 2 * _COLUMNS, gl.SliceLayout(0, layout))
        columns = column + lane % _COLUMNS
        place = bias_ptr + columns + (lane // _COLUMNS) * second
        there = columns + (lane // _COLUMNS) * (second % n) < n
        acc += gl.expand_dims(gl.load(place, mask=there, other=0.0).to(gl.float32), 0)
    if GATED == _PLAIN:
        acc *= gl.expand_dims(factor, 1)
    left, right = gl.split(acc.reshape([_ROWS, 2, _COLUMNS]).permute((0, 2, 1)))
    if GATED == _PLAIN:
        _store(left, order_ptr, out_ptr, first, end, column, tokens, n, choices, GATED)
        _store(right, order_ptr, out_ptr, first, end, column + second, tokens, n, choices, GATED)
    else:
        out = _gated(left, right, GATED)
        _store(out, order_ptr, out_ptr, first, end, column, tokens, n, choices, GATED)
    return at


@gluon.jit
def _pass_by(ready, free, at, k: gl.constexpr):
    """Of a warpgroup that has no tokens of a tile: the step after it."""
    for _ in range(k // _DEPTH):
        stage = at % _STAGES
        mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    return at


@gluon.jit
def _multiply(
    part: gl.constexpr,
    x_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr, weights_ptr, out_ptr, tokens,
    experts: gl.constexpr, count: gl.constexpr, columns: gl.constexpr,
    step: gl.constexpr, second: gl.constexpr, rows: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    at = 0
    expert, begin, end = block_at(block_ptr, gl.program_id(0), count, columns)
    for tile in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        # Read while this tile is multiplied.
        later = block_at(block_ptr, tile + gl.num_programs(0), count, columns)
        if expert < experts:
            if GATED != _PLAIN and begin + part * _ROWS >= end:
                at = _pass_by(ready, free, at, k)
            else:
                at = _multiply_tile(
                    part, x_ring, w_ring, ready, free, bias_ptr + expert * rows, order_ptr,
                    weights_ptr, out_ptr, at, begin, end, tile % columns * step, tokens, second,
                    n, k, choices, BIAS, GATED,
                )  # fmt: skip
        expert, begin, end = later


@gluon.jit
def _program(
    x, w, bias_ptr, block_ptr, order_ptr, weights_ptr, tokens, out_ptr,
    experts: gl.constexpr, count: gl.constexpr, columns: gl.constexpr,
    step: gl.constexpr, second: gl.constexpr, rows: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    gather: gl.constexpr = GATED != _PLAIN
    boxes: gl.constexpr = 2 if gather else 1
    box: gl.constexpr = 2 * _ROWS // boxes
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES * boxes, box, _DEPTH], w.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 2 * _COLUMNS, _DEPTH], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=2 if gather else 1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, x_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr, weights_ptr,
                out_ptr, tokens, experts, count, columns, step, second, rows, n, k, choices,
                BIAS, GATED,
            )),
            (_multiply, (
                1, x_ring, w_ring, ready, free, bias_ptr, block_ptr, order_ptr, weights_ptr,
                out_ptr, tokens, experts, count, columns, step, second, rows, n, k, choices,
                BIAS, GATED,
            )),
            (copy, (
                x, w, x_ring, w_ring, ready, free, block_ptr, order_ptr,
                experts, count, columns, step, second, rows, k, choices, gather,
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
        out_type=jax.ShapeDtypeStruct((3, most), jnp.int32),
        grid=(1, most),
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
    step = COLUMNS if gated else 2 * COLUMNS
    columns = triton.cdiv(n, step)
    blocks, order, weights, tokens = lists
    return triton_call(
        x if gated else tensor_descriptor(x, (TOKENS, DEPTH), layout),
        tensor_descriptor(weight.reshape(count * rows, k), (COLUMNS, DEPTH), layout),
        weights if bias is None else bias, blocks, order, weights, tokens,
        kernel=_program,
        name=f"experts_{'gate_up' if gated else 'down'}_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size, n), x.dtype),
        grid=(min(target.gpu.multiprocessors, blocks.shape[1] * columns),),
        num_warps=4,
        experts=count, count=blocks.shape[1], columns=columns, step=step,
        second=n if gated else COLUMNS, rows=rows, n=n, k=k, choices=ids.shape[1],
        BIAS=bias is not None, GATED=gated,
    )  # fmt: skip
