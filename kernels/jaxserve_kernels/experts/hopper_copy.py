"""The producer warps of `hopper.py`: they fill its rings with tokens and weight rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
)

from jaxserve_kernels.experts.hopper_lists import (
    BOX,
    DOWN,
    copy_pairs,
    wait_for_pairs,
    write_lists,
)

DEPTH = 64
"""Inputs of a panel of tokens in bfloat16."""
PANEL = 128
"""Bytes of a token in a panel. In e4m3 they are as many inputs."""
GATHERERS = gl.constexpr(128)
"""Threads that copy tokens which are not in expert order."""
_DEPTH = gl.constexpr(DEPTH)
_PANEL = gl.constexpr(PANEL)
_BOX = gl.constexpr(BOX)


@gluon.jit
def block_at(block_ptr, tile, count: gl.constexpr, columns: gl.constexpr):
    """A tile's expert, and the begin and end of its tokens."""
    block = gl.minimum(gl.maximum(tile, 0) // columns, count - 1)
    expert = gl.load(block_ptr + block)
    begin = gl.load(block_ptr + count + block)
    end = gl.load(block_ptr + 2 * count + block)
    return expert, begin, end


@gluon.jit
def tiles_of(block_ptr, count: gl.constexpr, columns: gl.constexpr):
    """The program's first tile, the distance to its next one, and how many it has.

    Programs walk through the tiles from both ends, so that at any time large tiles, which the
    tensor cores limit, run beside small ones, which memory limits. Those of one expert walk in the
    same direction.
    """
    tiles = gl.load(block_ptr + 3 * count) * columns
    program, programs = gl.program_id(0), gl.num_programs(0)
    mine = (tiles - program + programs - 1) // programs
    backwards = program // columns % 2
    first = program + backwards * (mine - 1) * programs
    return first, (1 - 2 * backwards) * programs, mine


@gluon.jit
def ring(blocks, COPIES: gl.constexpr, STAGES: gl.constexpr):
    """Allocates room for COPIES blocks of a tensor in each stage."""
    shape: gl.constexpr = [STAGES * COPIES] + blocks.block_shape  # noqa: RUF005
    return gl.allocate_shared_memory(blocks.dtype, shape, blocks.layout)


@gluon.jit
def _copy_rows(source, rings, bar, stage, expert, row, step, GROUPED: gl.constexpr):
    """Copies a step's rows of 64 inputs, or its code tiles of 64 rows by 128 inputs with their
    groups' scales.

    Each is one copy, because the compiler lets the producer's warps wait for each other between
    copies to the same ring. What lies past the expert's last row is filled with 0.
    """
    _, w, scales = source
    _, _, w_ring, s_ring, _, _ = rings
    if w.dtype == gl.bfloat16:
        tma.async_load(w, [expert, row, step * _DEPTH], bar, w_ring.index(stage))
    else:
        tma.async_load(w, [expert, row // 64, step, 0, 0], bar, w_ring.index(stage))
        if GROUPED:
            tma.async_load(scales, [expert, row // 64, step * 64], bar, s_ring.index(stage))


@gluon.jit
def _copy_gate_and_up(
    source, rings, bar, stage, expert, row, step, steps: gl.constexpr, rows: gl.constexpr,
    GROUPED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`_copy_rows` of half as many rows of gate, from `row` on, and of up: 8 of either in turn.
    Code tiles need a copy for each 64 rows of either: see `hopper_blocks.blocks_of`."""
    _, w, scales = source
    _, _, w_ring, s_ring, _, _ = rings
    if w.dtype == gl.bfloat16:
        tma.async_load(w, [expert, row // 8, 0, 0, step * _DEPTH], bar, w_ring.index(stage))
    else:
        tile = (expert * (rows // 64) + row // 64) * steps + step
        COPIES: gl.constexpr = w_ring.shape[0] // STAGES
        for block in gl.static_range(COPIES):
            to = w_ring.index(COPIES * stage + block)
            tma.async_load(w, [tile + block * steps, 0, 0, 0, 0], bar, to)
        if GROUPED:
            first = expert * (rows // 64 * steps) + step
            tma.async_load(scales, [first, row // 64, 0, 0, 0], bar, s_ring.index(stage))


@gluon.jit
def _box(x_ring, t_ring, panel, box: gl.constexpr):
    """The place of a box in a panel of the rings."""
    if box < x_ring.shape[1] // _BOX:
        place = x_ring.index(panel).slice(box * _BOX, _BOX, dim=0)
    else:
        place = t_ring.index(panel)
    return place


@gluon.jit
def _step_of_tokens(step, steps: gl.constexpr, SUMS: gl.constexpr):
    """Which panels of tokens a step multiplies. Their sums lie behind them."""
    if SUMS:
        step = gl.where(step == 0, steps, step - 1)
    return step


@gluon.jit
def _copy_tile(
    source, rings, at, begin, end, expert, row, k: gl.constexpr,
    GROUPED: gl.constexpr, SUMS: gl.constexpr,
    WEIGHT: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the weights and tokens of one tile. Boxes without tokens are skipped. SUMS: tokens
    have a first step, of their sums."""
    x, _, _ = source
    x_ring, t_ring, _, _, ready, free = rings
    inputs: gl.constexpr = t_ring.shape[2]
    boxes = (end - begin + _BOX - 1) // _BOX
    steps: gl.constexpr = k // (PANELS * inputs)
    for step in range(steps + SUMS):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        if step >= SUMS:
            _expect(bar, boxes, x_ring.shape[1] // _BOX, WEIGHT, PANELS)
            _copy_rows(source, rings, bar, stage, expert, row, step - SUMS, GROUPED)
        else:
            _expect(bar, boxes, x_ring.shape[1] // _BOX, 0, PANELS)
        for panel in gl.static_range(PANELS):
            depth = (_step_of_tokens(step, steps, SUMS) * PANELS + panel) * inputs
            to = stage * PANELS + panel
            for box in gl.static_range(x_ring.shape[1] // _BOX + 1):
                place = _box(x_ring, t_ring, to, box)
                tma.async_load(x, [begin + box * _BOX, depth], bar, place, pred=box < boxes)
        at += 1
    return at


@gluon.jit
def _expect(bar, boxes, BOXES: gl.constexpr, WEIGHT: gl.constexpr, PANELS: gl.constexpr):
    for some in gl.static_range(1, BOXES + 2):
        mbarrier.expect(bar, WEIGHT + some * (PANELS * _BOX * _PANEL), pred=boxes == some)


@gluon.jit
def _gather_tile(
    source, rings, pairs, at, begin, end, expert, row,
    inputs: gl.constexpr, k: gl.constexpr, rows: gl.constexpr, choices: gl.constexpr,
    GROUPED: gl.constexpr, SUMS: gl.constexpr, WEIGHT: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the weights of one tile and gathers its tokens. All of a panel are one copy, because
    the compiler lets the warps wait for each other between any two."""
    x_ptr, _, _ = source
    x_ring, t_ring, _, _, ready, free = rings
    depth: gl.constexpr = t_ring.shape[2]
    flat: gl.constexpr = gl.BlockedLayout([1, depth // 8], [4, 8], [4, 1], [1, 0])
    main = _tokens(x_ptr, pairs[0], begin, end, flat, depth, inputs, choices)
    last = _tokens(x_ptr, pairs[1], begin + x_ring.shape[1], end, flat, depth, inputs, choices)
    steps: gl.constexpr = k // (PANELS * depth)
    for step in range(steps + SUMS):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        if step >= SUMS:
            mbarrier.expect(bar, WEIGHT)
            _copy_gate_and_up(
                source, rings, bar, stage, expert, row, step - SUMS, steps, rows, GROUPED, STAGES
            )
        else:
            mbarrier.arrive(bar, count=1)
        for panel in gl.static_range(PANELS):
            to = stage * PANELS + panel
            past = (_step_of_tokens(step, steps, SUMS) * PANELS + panel) * depth
            _gather(x_ring.index(to), main, past, inputs, k)
            if begin + x_ring.shape[1] < end:
                _gather(t_ring.index(to), last, past, inputs, k)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        at += 1
    return at


@gluon.jit
def _tokens(
    x_ptr, pairs, begin, end, layout: gl.constexpr, depth: gl.constexpr, inputs: gl.constexpr,
    choices: gl.constexpr,
):  # fmt: skip
    """Pointers to the first `depth` inputs of tokens of a tile, which of the tokens are there, and
    numbers of the inputs."""
    of_token: gl.constexpr = gl.SliceLayout(1, layout)
    there = begin + gl.arange(0, pairs.shape[0], of_token) < end
    token = pairs.load(of_token) // choices
    number = gl.expand_dims(gl.arange(0, depth, gl.SliceLayout(0, layout)), 0)
    source = x_ptr + (gl.expand_dims(token * inputs, 1) + number)
    there, _ = gl.broadcast(gl.expand_dims(there, 1), source)
    return source, there, number


@gluon.jit
def _gather(place, tokens, past, inputs: gl.constexpr, k: gl.constexpr):
    """Gathers a panel of tokens, from input `past` on. Tokens that are not there, and inputs that
    only the padded weight has, are filled with 0."""
    source, there, number = tokens
    if inputs < k:
        known, _ = gl.broadcast(past + number < inputs, source)
        there = there & known
    async_copy.async_load(place, source + past, there)


@gluon.jit
def copy(
    copies, block_ptr, tokens,
    count: gl.constexpr, columns: gl.constexpr, step: gl.constexpr,
    rows: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    GATED: gl.constexpr, GROUPED: gl.constexpr, SUMS: gl.constexpr,
    WEIGHT: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the tokens and weights of every step of each of the program's tiles, and writes the
    tile's lists. Programs that run at the same time share the tokens of a block.

    source: tokens, weights and scales. rings: of tokens, of their last box, of weights and scales,
    and barriers of full and free stages. arrays: the order of pairs, their weights and the tokens'
    scales. Down's tokens are a descriptor of tokens in expert order. Those of gate and up are a
    pointer to tokens in their original order. TMA cannot gather those. So GATHERERS threads copy
    them by `cp.async`, and each arrives at a full stage's barrier when its copies are done. Who
    reads them needs a fence.
    """
    source, rings, lists, arrays = copies
    WARPS: gl.constexpr = 1 if GATED == DOWN else GATHERERS // 32
    BYTES: gl.constexpr = rings[0].dtype == gl.float8e4nv
    order_ptr, _, _ = arrays
    at = 0
    tile, stride, tiles = tiles_of(block_ptr, count, columns)
    expert, begin, end = block_at(block_ptr, tile, count, columns)
    later = block_at(block_ptr, tile + stride, count, columns)
    copy_pairs(order_ptr, lists, 0, begin, end, WARPS)
    for number in range(tiles):
        copy_pairs(order_ptr, lists, number + 1, later[1], later[2], WARPS)
        last = block_at(block_ptr, tile + 2 * stride, count, columns)
        pairs = wait_for_pairs(lists, number)
        row = tile % columns * step
        if GATED == DOWN:
            at = _copy_tile(
                source, rings, at, begin, end, expert, row, k, GROUPED, SUMS, WEIGHT, PANELS, STAGES
            )
        else:
            at = _gather_tile(
                source, rings, pairs, at, begin, end, expert, row, inputs, k, rows, choices,
                GROUPED, SUMS, WEIGHT, PANELS, STAGES,
            )  # fmt: skip
        write_lists(arrays, lists, pairs, number, begin, end, tokens, choices, GATED, BYTES, WARPS)
        tile += stride
        expert, begin, end = later
        later = last
    wait_for_pairs(lists, tiles)  # of a tile after the last one: no copy outlives the program
