"""Lists of a tile's tokens in shared memory of `hopper.py`: where results go, and their factors.

Producer warps copy them while the tile is multiplied, so that nobody waits for these loads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

BOX = 32
"""Tokens of one copy. A tile has an even number of such boxes and perhaps another one."""
_BOX = gl.constexpr(BOX)
DOWN = gl.constexpr(0)
"""GATED of the down product, beside the values of `activation.gating` and `OSS`."""
FACTOR, SCALE = gl.constexpr(0), gl.constexpr(1)
"""Indices of lists: a token's weight, of down only, and the scale of its inputs, if these are in
bytes."""
WRITTEN, READ, PAIRS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Indices of barriers: lists are written, lists were read, and two of pairs."""


@gluon.jit
def room_for_lists(
    MAIN: gl.constexpr, BYTES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr
):
    """The lists of a tile's first tokens, those of its last box, and barriers.

    Lists are the tokens' rows of the result, -1 past the last token; their factors and scales; and
    the pairs of this tile and of the next one. WRITERS: threads. READERS: parts of the program.
    """
    main = _lists(MAIN, BYTES)
    last = _lists(_BOX, BYTES)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(WRITTEN), count=WRITERS + 1)
    mbarrier.init(bars.index(READ), count=READERS)
    mbarrier.init(bars.index(PAIRS), count=WRITERS)
    mbarrier.init(bars.index(PAIRS + 1), count=WRITERS)
    return main, last, bars


@gluon.jit
def _lists(TOKENS: gl.constexpr, BYTES: gl.constexpr):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.int32, [TOKENS], flat)
    numbers = gl.allocate_shared_memory(gl.float32, [2 if BYTES else 1, TOKENS], flat)
    return rows, numbers, gl.allocate_shared_memory(gl.int32, [2, TOKENS], flat)


@gluon.jit
def copy_pairs(order_ptr, lists, number, begin, end, WARPS: gl.constexpr):
    """Begins to copy the pairs of tile `number`: 0 past the last one."""
    main, last, bars = lists
    slot = number & 1
    MAIN: gl.constexpr = main[0].shape[0]
    place = begin + _lanes(MAIN, WARPS)
    async_copy.async_load(main[2].index(slot), order_ptr + place, mask=place < end)
    place = begin + MAIN + _lanes(_BOX, WARPS)
    async_copy.async_load(last[2].index(slot), order_ptr + place, mask=place < end)
    async_copy.mbarrier_arrive(bars.index(PAIRS + slot), increment_count=False)


@gluon.jit
def wait_for_pairs(lists, number):
    """Returns the pairs of tile `number`, of its first tokens and of its last box."""
    main, last, bars = lists
    slot = number & 1
    mbarrier.wait(bars.index(PAIRS + slot), (number >> 1) & 1)
    return main[2].index(slot), last[2].index(slot)


@gluon.jit
def write_lists(
    arrays, lists, pairs, number, begin, end, tokens, choices: gl.constexpr,
    GATED: gl.constexpr, BYTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begins to write the lists of tile `number`, once those of the one before were read."""
    main, last, bars = lists
    mbarrier.wait(bars.index(READ), (number & 1) ^ 1)
    _write(arrays, main, pairs[0], begin, end, tokens, choices, GATED, BYTES, WARPS)
    _write(
        arrays, last, pairs[1], begin + main[0].shape[0], end, tokens, choices, GATED, BYTES, WARPS
    )
    async_copy.mbarrier_arrive(bars.index(WRITTEN), increment_count=False)
    mbarrier.arrive(bars.index(WRITTEN), count=1)


@gluon.jit
def _lanes(COUNT: gl.constexpr, WARPS: gl.constexpr):
    return gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def _write(
    arrays, lists, pairs, first, end, tokens, choices: gl.constexpr,
    GATED: gl.constexpr, BYTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes the lists of the pairs from `first` on. The result of down is in the order of choice
    and token, that of gate and up in expert order."""
    _, weights_ptr, token_scale_ptr = arrays
    rows, numbers, _ = lists
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = first + _lanes(rows.shape[0], WARPS)
    there = place < end
    pair = pairs.load(flat)
    row = place
    of_scale = pair // choices
    if GATED == DOWN:
        row = (pair % choices) * tokens + of_scale
        of_scale = place
        async_copy.async_load(numbers.index(FACTOR), weights_ptr + pair, mask=there)
    if BYTES:
        async_copy.async_load(numbers.index(SCALE), token_scale_ptr + of_scale, mask=there)
    rows.store(gl.where(there, row, -1))
