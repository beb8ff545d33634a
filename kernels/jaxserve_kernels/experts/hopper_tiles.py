"""What a part of the multiplying warps does in `hopper.py`: tile by tile, sums and results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxserve_kernels.experts.hopper_copy import block_at, tiles_of
from jaxserve_kernels.experts.hopper_four_bits import begin_of, four_bit_sums
from jaxserve_kernels.experts.hopper_lists import BOX, DOWN, MAIN, READ, WRITTEN
from jaxserve_kernels.experts.hopper_results import finish, halves
from jaxserve_kernels.experts.hopper_sums import PLAIN, code_sums, shared_sums
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4

LEAST = 2
"""The fewest boxes of a tile, also if some have no tokens."""
_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
_LEAST = gl.constexpr(LEAST)
_BOXES = gl.constexpr(MAIN // BOX)
_INT4 = gl.constexpr(INT4.value)


@gluon.jit
def _begins(
    HALF: gl.constexpr, factors, expert, column,
    second: gl.constexpr, rows: gl.constexpr, all_rows: gl.constexpr, k: gl.constexpr,
    KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`begin_of` both halves of a tile of 4-bit codes. Other sums begin with nothing."""
    begins = expert, expert
    if KIND >= _INT4:
        row = expert * rows + column
        left = begin_of(factors, row, all_rows, HALF, k, KIND, ZERO)
        begins = left, begin_of(factors, row + second, all_rows, HALF, k, KIND, ZERO)
    return begins


@gluon.jit
def _multiply_tile(
    part: gl.constexpr, HALF: gl.constexpr,
    rings, factors, results, bias_ptr, block_ptr, out_ptr, at, number, begins, expert, column,
    later, tile, beyond,
    count: gl.constexpr, columns: gl.constexpr, step: gl.constexpr, second: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, UNPACK: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores the program's tile `number`.

    Starts at step `at` of the rings, and returns the step after the tile. The program goes on with
    tile `tile`, of block `later`, and then with tile `beyond`. What they need is loaded before
    results are stored: returns the first one's `begins`, and the block of the second. The second
    half of a tile begins `second` rows after the first. BOXES: those of the tile's tokens. Shapes
    are powers of two, so the last of an odd number has sums of its own.
    """
    TOKENS: gl.constexpr = BOXES // 2 * 2 * _BOX
    TAIL: gl.constexpr = BOXES % 2 == 1
    SOME: gl.constexpr = TOKENS // 2
    BYTES: gl.constexpr = rings[0].dtype == gl.float8e4nv
    GATHER: gl.constexpr = GATED != DOWN
    row = expert * rows + column
    if KIND >= _INT4:
        left, right, short_left, short_right, at = four_bit_sums(
            part, HALF, rings, begins[0], begins[1], at, k, STAGES, TOKENS, TAIL, GATHER, KIND,
            ZERO,
        )  # fmt: skip
    elif KIND == PLAIN or BYTES:
        left, right, short_left, short_right, at = shared_sums(
            part, HALF, rings, factors[0], row, row + second, all_rows, at, k, STAGES, TOKENS,
            TAIL, GATHER, KIND, GROUP,
        )  # fmt: skip
    else:
        left, right, short_left, short_right, at = code_sums(
            part, HALF, rings, factors[0], row, row + second, all_rows, at, k, STAGES, TOKENS,
            TAIL, GATHER, KIND, GROUP, UNPACK,
        )  # fmt: skip
    staged, lists = results
    listed, last_listed, bars = lists
    mbarrier.wait(bars.index(WRITTEN), number & 1)
    begins = _begins(
        HALF, factors, later[0], _column(tile, columns, step, part, HALF), second, rows, all_rows,
        k, KIND, ZERO,
    )  # fmt: skip
    last_block = block_at(block_ptr, beyond, count, columns)
    bias_ptr += expert * rows
    if TAIL:
        finish(
            short_left, short_right, staged, out_ptr, bias_ptr,
            last_listed if TOKENS == _MAIN else listed, 0 if TOKENS == _MAIN else TOKENS, column,
            second, n, GATED, BIAS, BYTES,
        )  # fmt: skip
    left_first, left_then = halves(left)
    right_first, right_then = halves(right)
    finish(
        left_first, right_first, staged, out_ptr, bias_ptr, listed, 0, column, second, n, GATED,
        BIAS, BYTES,
    )  # fmt: skip
    finish(
        left_then, right_then, staged, out_ptr, bias_ptr, listed, SOME, column, second, n, GATED,
        BIAS, BYTES,
    )  # fmt: skip
    mbarrier.arrive(bars.index(READ), count=1)
    return at, begins, last_block


@gluon.jit
def _column(
    tile, columns: gl.constexpr, step: gl.constexpr, part: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """A part's first row of a tile, in its expert. There may be no such tile after the last one."""
    return gl.maximum(tile, 0) % columns * step + part * HALF


@gluon.jit
def multiply(
    part: gl.constexpr, HALF: gl.constexpr,
    rings, factors, results, bias_ptr, block_ptr, out_ptr,
    count: gl.constexpr, columns: gl.constexpr, step: gl.constexpr, second: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, UNPACK: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores a part's rows of each of the program's tiles: HALF of either half."""
    at = 0
    tile, stride, tiles = tiles_of(block_ptr, count, columns)
    block = block_at(block_ptr, tile, count, columns)
    later = block_at(block_ptr, tile + stride, count, columns)
    column = _column(tile, columns, step, part, HALF)
    begins = _begins(HALF, factors, block[0], column, second, rows, all_rows, k, KIND, ZERO)
    for number in range(tiles):
        expert, begin, end = block
        column = _column(tile, columns, step, part, HALF)
        tile += stride
        last = later  # replaced: a tile has one of these sizes
        used = gl.maximum((end - begin + _BOX - 1) // _BOX, _LEAST)
        for boxes in gl.static_range(_LEAST, _BOXES + 2):
            if used == boxes:
                at, begins, last = _multiply_tile(
                    part, HALF, rings, factors, results, bias_ptr, block_ptr, out_ptr, at, number,
                    begins, expert, column, later, tile, tile + stride, count, columns, step,
                    second, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO, UNPACK,
                    boxes,
                )  # fmt: skip
        block, later = later, last
