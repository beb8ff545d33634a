"""The producers of `hopper.py`: they fill its ring with tokens and rows of a weight."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

ROWS, COLUMNS, DEPTH = 64, 128, 64
"""Tokens of a warpgroup, columns of which a tile has twice as many, inputs of a step."""
STAGES = 4
"""Of 48 KB: what shared memory holds."""
_ROWS = gl.constexpr(ROWS)
_COLUMNS = gl.constexpr(COLUMNS)
_DEPTH = gl.constexpr(DEPTH)
_STAGES = gl.constexpr(STAGES)
_BEHIND = gl.constexpr(STAGES - 2)
"""Steps that gathered tokens may be under way: a place is freed when the next is multiplied."""
_TOKENS = gl.constexpr(2 * ROWS * DEPTH * 2)
_WEIGHT = gl.constexpr(2 * COLUMNS * DEPTH * 2)
"""Bytes."""


@gluon.jit
def block_at(block_ptr, tile, count: gl.constexpr, columns: gl.constexpr):
    """Of a tile its expert, and where its tokens begin and end; past the last tile those of it."""
    block = gl.minimum(tile // columns, count - 1)
    expert = gl.load(block_ptr + block)
    begin = gl.load(block_ptr + count + block)
    end = gl.load(block_ptr + 2 * count + block)
    return expert, begin, end


@gluon.jit
def _copy_weight(w, w_ring, bar, stage, row, depth, second: gl.constexpr):
    tma.async_load(w, [row, depth], bar, w_ring.index(stage).slice(0, _COLUMNS, dim=0))
    right = w_ring.index(stage).slice(_COLUMNS, _COLUMNS, dim=0)
    tma.async_load(w, [row + second, depth], bar, right)


@gluon.jit
def _copy_tile(
    x, w, x_ring, w_ring, ready, free, at, begin, row, second: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    for depth in range(0, k, _DEPTH):
        stage = at % _STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // _STAGES) & 1) ^ 1)
        mbarrier.expect(bar, _TOKENS + _WEIGHT)
        tma.async_load(x, [begin, depth], bar, x_ring.index(stage))
        _copy_weight(w, w_ring, bar, stage, row, depth, second)
        at += 1
    return at


@gluon.jit
def _gather_tile(
    x_ptr, w, x_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
    second: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
):  # fmt: skip
    """A box of tokens for each warpgroup that has any."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, _ROWS, gl.SliceLayout(1, flat))
    depths = gl.expand_dims(gl.arange(0, _DEPTH, gl.SliceLayout(0, flat)), 0)
    places = ()
    for each in gl.static_range(2):
        place = begin + each * _ROWS + lane
        pair = gl.load(order_ptr + place, mask=place < end, other=0)
        places = places + (gl.expand_dims(pair // choices * k, 1) + depths,)  # noqa: RUF005
    for depth in range(0, k, _DEPTH):
        stage = at % _STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // _STAGES) & 1) ^ 1)
        mbarrier.expect(bar, _WEIGHT)
        _copy_weight(w, w_ring, bar, stage, row, depth, second)
        for each in gl.static_range(2):
            if begin + each * _ROWS < end:
                box = x_ring.index(stage * 2 + each)
                async_copy.async_load(box, x_ptr + depth + places[each])
        async_copy.commit_group()
        async_copy.wait_group(_BEHIND)
        _arrive(ready, at - _BEHIND)
        at += 1
    return at


@gluon.jit
def _arrive(ready, at):
    """The copies of step `at` are done, if there is one."""
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(ready.index((at + _STAGES) % _STAGES), count=1, pred=at >= 0)


@gluon.jit
def copy(
    x, w, x_ring, w_ring, ready, free, block_ptr, order_ptr,
    experts: gl.constexpr, count: gl.constexpr, columns: gl.constexpr,
    step: gl.constexpr, second: gl.constexpr, rows: gl.constexpr, k: gl.constexpr,
    choices: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """What is multiplied in each step of each of the program's tiles. Programs that run together
    share the tokens of a block.

    x is a descriptor of tokens in their experts' order; with GATHER a pointer to tokens in their
    own order, which TMA cannot gather: four warps copy them by `cp.async`.
    """
    at = 0
    expert, begin, end = block_at(block_ptr, gl.program_id(0), count, columns)
    for tile in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        later = block_at(block_ptr, tile + gl.num_programs(0), count, columns)
        if expert < experts:
            row = expert * rows + tile % columns * step
            if GATHER:
                at = _gather_tile(
                    x, w, x_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
                    second, k, choices,
                )  # fmt: skip
            else:
                at = _copy_tile(x, w, x_ring, w_ring, ready, free, at, begin, row, second, k)
        expert, begin, end = later
    if GATHER:
        async_copy.wait_group(0)
        for left in gl.static_range(_BEHIND):
            _arrive(ready, at - _BEHIND + left)
