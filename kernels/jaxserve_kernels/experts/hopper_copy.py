"""The producer warps of `hopper.py`: they fill its rings with tokens and weight rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

ROWS, DEPTH = 128, 64
"""Half of a tile's weight rows; inputs of a panel of tokens."""
MAIN, BOX = 128, 32
"""Tokens of a tile, and tokens of one copy (a box). A tile may have one box more than MAIN."""
_ROWS = gl.constexpr(ROWS)
_DEPTH = gl.constexpr(DEPTH)
_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
_BOXES = gl.constexpr(MAIN // BOX)


@gluon.jit
def block_at(block_ptr, tile, count: gl.constexpr, columns: gl.constexpr):
    """A tile's expert, and the begin and end of its tokens."""
    block = gl.minimum(tile // columns, count - 1)
    expert = gl.load(block_ptr + block)
    begin = gl.load(block_ptr + count + block)
    end = gl.load(block_ptr + 2 * count + block)
    return expert, begin, end


@gluon.jit
def _copy_weight(w, w_ring, bar, stage, row, step, second: gl.constexpr, k: gl.constexpr):
    """Copies rows of 64 inputs, or code tiles of 64 rows by 128 inputs."""
    if w.dtype == gl.bfloat16:
        place = w_ring.index(stage)
        tma.async_load(w, [row, step * _DEPTH], bar, place.slice(0, _ROWS, dim=0))
        tma.async_load(w, [row + second, step * _DEPTH], bar, place.slice(_ROWS, _ROWS, dim=0))
    else:
        for tile in gl.static_range(_ROWS // 64):
            at = row + tile * 64
            place = w_ring.index(stage * (_ROWS // 32) + tile)
            tma.async_load(w, [at * (k // 128) + step * 64, 0], bar, place)
            place = w_ring.index(stage * (_ROWS // 32) + _ROWS // 64 + tile)
            tma.async_load(w, [(at + second) * (k // 128) + step * 64, 0], bar, place)


@gluon.jit
def _copy_tile(
    x, w, x_ring, t_ring, w_ring, ready, free, at, begin, row,
    second: gl.constexpr, k: gl.constexpr, WEIGHT: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    boxes: gl.constexpr = _BOXES + 1 if TAIL else _BOXES
    for step in range(k // (PANELS * _DEPTH)):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, WEIGHT + PANELS * boxes * _BOX * _DEPTH * 2)
        _copy_weight(w, w_ring, bar, stage, row, step, second, k)
        for panel in gl.static_range(PANELS):
            depth = (step * PANELS + panel) * _DEPTH
            to = stage * PANELS + panel
            for box in gl.static_range(_BOXES):
                place = x_ring.index(to * _BOXES + box)
                tma.async_load(x, [begin + box * _BOX, depth], bar, place)
            if TAIL:
                tma.async_load(x, [begin + _MAIN, depth], bar, t_ring.index(to))
        at += 1
    return at


@gluon.jit
def _gather_tile(
    x_ptr, w, x_ring, t_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
    second: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    WEIGHT: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Gathers the tokens of one tile. Boxes without tokens are skipped."""
    boxes: gl.constexpr = _BOXES + 1 if TAIL else _BOXES
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, _BOX, gl.SliceLayout(1, flat))
    depths = gl.expand_dims(gl.arange(0, _DEPTH, gl.SliceLayout(0, flat)), 0)
    places = ()
    for box in gl.static_range(boxes):
        place = begin + box * _BOX + lane
        pair = gl.load(order_ptr + place, mask=place < end, other=0)
        places = places + (gl.expand_dims(pair // choices * inputs, 1) + depths,)  # noqa: RUF005
    for step in range(k // (PANELS * _DEPTH)):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, WEIGHT)
        _copy_weight(w, w_ring, bar, stage, row, step, second, k)
        for box in gl.static_range(boxes):
            if begin + box * _BOX < end:
                source = x_ptr + step * (PANELS * _DEPTH) + places[box]
                for panel in gl.static_range(PANELS):
                    to = stage * PANELS + panel
                    there = step * (PANELS * _DEPTH) + panel * _DEPTH + depths < inputs
                    if box < _BOXES:
                        _gather(x_ring.index(to * _BOXES + box), source, there, panel, inputs, k)
                    else:
                        _gather(t_ring.index(to), source, there, panel, inputs, k)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 2)
        _arrive(ready, at - (STAGES - 2), STAGES)
        at += 1
    return at


@gluon.jit
def _gather(place, source, there, panel: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr):
    """Gathers one panel of a box. Inputs that only the padded weight has are filled with 0."""
    source += panel * _DEPTH
    if inputs < k:
        there, _ = gl.broadcast(there, source)
        async_copy.async_load(place, source, there)
    else:
        async_copy.async_load(place, source)


@gluon.jit
def _arrive(ready, at, STAGES: gl.constexpr):
    """Signals that the copies of step `at` are done, if there is such a step."""
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(ready.index((at + STAGES) % STAGES), count=1, pred=at >= 0)


@gluon.jit
def _fill(
    x, w, x_ring, t_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
    second: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    GATHER: gl.constexpr, WEIGHT: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    if GATHER:
        at = _gather_tile(
            x, w, x_ring, t_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
            second, inputs, k, choices, WEIGHT, PANELS, STAGES, TAIL,
        )  # fmt: skip
    else:
        at = _copy_tile(
            x, w, x_ring, t_ring, w_ring, ready, free, at, begin, row,
            second, k, WEIGHT, PANELS, STAGES, TAIL,
        )  # fmt: skip
    return at


@gluon.jit
def copy(
    x, w, x_ring, t_ring, w_ring, ready, free, block_ptr, order_ptr,
    count: gl.constexpr, columns: gl.constexpr, step: gl.constexpr,
    second: gl.constexpr, rows: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr,
    choices: gl.constexpr, GATHER: gl.constexpr,
    WEIGHT: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the tokens and weights of every step of each of the program's tiles. Programs that run
    at the same time share the tokens of a block.

    x is a descriptor of tokens in expert order. With GATHER it is a pointer to tokens in their
    original order. TMA cannot gather those, so four warps copy them by `cp.async`.
    """
    at = 0
    tiles = gl.load(block_ptr + 3 * count) * columns
    expert, begin, end = block_at(block_ptr, gl.program_id(0), count, columns)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        later = block_at(block_ptr, tile + gl.num_programs(0), count, columns)
        row = expert * rows + tile % columns * step
        if end - begin > _MAIN:
            at = _fill(
                x, w, x_ring, t_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
                second, inputs, k, choices, GATHER, WEIGHT, PANELS, STAGES, True,
            )  # fmt: skip
        else:
            at = _fill(
                x, w, x_ring, t_ring, w_ring, ready, free, order_ptr, at, begin, end, row,
                second, inputs, k, choices, GATHER, WEIGHT, PANELS, STAGES, False,
            )  # fmt: skip
        expert, begin, end = later
    if GATHER:
        # Gathers of up to STAGES - 2 steps may still be in flight: a ring slot becomes free only
        # when the step after it is multiplied.
        async_copy.wait_group(0)
        for left in gl.static_range(STAGES - 2):
            _arrive(ready, at - (STAGES - 2) + left, STAGES)
