"""What a part of the multiplying warps does in `hopper.py`: tile by tile, sums and results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxserve_kernels.experts.hopper_copy import block_at, tiles_of
from jaxserve_kernels.experts.hopper_four_bits import begin_of, four_bit_sums
from jaxserve_kernels.experts.hopper_lists import BOX, DOWN, READ, WRITTEN
from jaxserve_kernels.experts.hopper_results import finish, halves
from jaxserve_kernels.experts.hopper_sums import PLAIN, code_sums, shared_sums
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4

LEAST = 2
"""The fewest boxes of a tile, also if some have no tokens."""
_BOX = gl.constexpr(BOX)
_LEAST = gl.constexpr(LEAST)
_INT4 = gl.constexpr(INT4.value)


@gluon.jit
def _multiply_tile(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    rings, factors, results, bias_ptr, block_ptr, out_ptr, at, number, begin, expert, column,
    later, tile, beyond,
    count: gl.constexpr, columns: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, UNPACK: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores the program's tile `number`, from `column` of the result on, which
    is also the first row of the expert.

    Starts at step `at` of the rings, and returns the step after the tile. The program goes on with
    tile `tile`, of block `later`, and then with tile `beyond`. What they need is loaded before
    results are stored: returns the first one's `begin`, and the block of the second. BOXES: those
    of the tile's tokens. Shapes are powers of two, so the last of an odd number has sums of its
    own.
    """
    TOKENS: gl.constexpr = BOXES // 2 * 2 * _BOX
    TAIL: gl.constexpr = BOXES % 2 == 1
    BYTES: gl.constexpr = rings[0].dtype == gl.float8e4nv
    first = expert * rows + column
    if KIND >= _INT4:
        main, short, at = four_bit_sums(
            part, PARTS, OWN, rings, begin, at, k, STAGES, TOKENS, TAIL, GATED, KIND, ZERO
        )
    elif KIND == PLAIN or BYTES:
        main, short, at = shared_sums(
            part, PARTS, OWN, rings, factors[0], first, n, all_rows, at, k, STAGES, TOKENS,
            TAIL, GATED, KIND, GROUP,
        )  # fmt: skip
    else:
        main, short, at = code_sums(
            part, PARTS, OWN, rings, factors[0], first, n, all_rows, at, k, STAGES, TOKENS,
            TAIL, GATED, KIND, GROUP, UNPACK,
        )  # fmt: skip
    staged, lists = results
    listed, last_listed, bars = lists
    mbarrier.wait(bars.index(WRITTEN), number & 1)
    begin = _begin(
        part, PARTS, OWN, factors, later[0], tile, columns, n, rows, all_rows, k, GATED,
        KIND, ZERO,
    )  # fmt: skip
    last_block = block_at(block_ptr, beyond, count, columns)
    bias_ptr += expert * rows
    if TAIL:
        last_box: gl.constexpr = rings[0].shape[1] == TOKENS
        finish(
            short, staged, out_ptr, bias_ptr, last_listed if last_box else listed,
            0 if last_box else TOKENS, column, rows, n, GATED, BIAS, BYTES,
        )  # fmt: skip
    left, right = halves(main)
    finish(left, staged, out_ptr, bias_ptr, listed, 0, column, rows, n, GATED, BIAS, BYTES)
    finish(
        right, staged, out_ptr, bias_ptr, listed, TOKENS // 2, column, rows, n, GATED,
        BIAS, BYTES,
    )  # fmt: skip
    mbarrier.arrive(bars.index(READ), count=1)
    return at, begin, last_block


@gluon.jit
def _column(
    tile, columns: gl.constexpr, part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """A part's first column of a tile, and its first row of the expert. There may be no such tile
    after the last one."""
    wide: gl.constexpr = OWN if GATED == DOWN else OWN // 2
    return gl.maximum(tile, 0) % columns * (PARTS * wide) + part * wide


@gluon.jit
def _begin(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    factors, expert, tile, columns: gl.constexpr, n: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`begin_of` a tile of 4-bit codes. Other sums begin with nothing."""
    begin = expert
    if KIND >= _INT4:
        first = expert * rows + _column(tile, columns, part, PARTS, OWN, GATED)
        begin = begin_of(factors, first, n, all_rows, OWN, k, GATED, KIND, ZERO)
    return begin


@gluon.jit
def multiply(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    rings, factors, results, bias_ptr, block_ptr, out_ptr,
    count: gl.constexpr, columns: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, UNPACK: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores a part's rows of each of the program's tiles."""
    at = 0
    tile, stride, tiles = tiles_of(block_ptr, count, columns)
    block = block_at(block_ptr, tile, count, columns)
    later = block_at(block_ptr, tile + stride, count, columns)
    begin = _begin(
        part, PARTS, OWN, factors, block[0], tile, columns, n, rows, all_rows, k, GATED,
        KIND, ZERO,
    )  # fmt: skip
    for number in range(tiles):
        expert, start, end = block
        column = _column(tile, columns, part, PARTS, OWN, GATED)
        tile += stride
        last = later  # replaced: a tile has one of these sizes
        used = gl.maximum((end - start + _BOX - 1) // _BOX, _LEAST)
        for boxes in gl.static_range(_LEAST, MOST + 1):
            if used == boxes:
                at, begin, last = _multiply_tile(
                    part, PARTS, OWN, rings, factors, results, bias_ptr, block_ptr, out_ptr, at,
                    number, begin, expert, column, later, tile, tile + stride, count, columns,
                    rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO, UNPACK,
                    boxes,
                )  # fmt: skip
        block, later = later, last
