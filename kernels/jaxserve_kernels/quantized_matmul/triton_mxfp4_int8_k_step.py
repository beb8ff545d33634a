"""A k-step of the streaming products with MXFP4 and int8 tokens.

Values of e2m1 are multiples of a half. So a row's codes are int8 numbers, if blocks have at least
an eighth of the power of its largest block: 16 times the value. Smaller blocks are rounded to these
steps. A table for each block has the magnitudes; a byte permutation looks up four codes.

With its sign bit set, a code selects the sign of a magnitude, which is 0. So codes as they are give
the positive values, p, and without their sign bits all magnitudes, m. The tensor cores multiply
both, and a sum is 2 p x - m x. No instruction applies signs.
"""

from __future__ import annotations

import functools

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from jaxserve_kernels.quantized_matmul.e4m3.hopper_mxfp4 import layout_of_words, of_blocks
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP
from jaxserve_kernels.quantized_matmul.triton_unpack import each

_LEAST = 8
"""Blocks with 2^-8 of the largest power, or less, count as zero."""


@functools.cache
def tables() -> np.ndarray:
    """int32 [_LEAST + 1, 2]: for each power below the largest one, eight bytes with the magnitudes
    of the codes 0 to 7 times 16, rounded to nearest."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 16
    rounded = np.rint(values / 2.0 ** np.arange(_LEAST + 1)[:, None])
    rounded[_LEAST] = 0
    return rounded.astype(np.uint8).view(np.int32)


_LAST = gl.constexpr(_LEAST)


@gluon.jit
def _magnitudes(words, few, many):
    """Four words of a block become four registers of positive values, and four of magnitudes, each
    with the codes of one word: e2m1 values times 16 over the table's power."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 m, w;
        and.b32 m, $8, 0x77777777; shr.u32 w, $8, 16;
        prmt.b32 $0, $10, $14, $8; prmt.b32 $4, $10, $14, m; shr.u32 m, m, 16;
        prmt.b32 $1, $10, $14, w; prmt.b32 $5, $10, $14, m;
        and.b32 m, $9, 0x77777777; shr.u32 w, $9, 16;
        prmt.b32 $2, $10, $14, $9; prmt.b32 $6, $10, $14, m; shr.u32 m, m, 16;
        prmt.b32 $3, $10, $14, w; prmt.b32 $7, $10, $14, m; }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [words, each(few, words.shape), each(many, words.shape)],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _operand(a, b, c, d, layout: gl.constexpr):
    """Bytes [rows, 4, 8] of each code of a word as a left operand [rows, 128], in the order
    `tokens.Order.EIGHTHS`."""
    rows: gl.constexpr = a.shape[0]
    both = gl.join(gl.join(a, c), gl.join(b, d)).reshape([rows, 4, 2, 4, 2, 2])
    both = both.permute((0, 2, 4, 5, 1, 3)).reshape([rows, 128])
    return gl.convert_layout(both, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)


@gluon.jit
def _looked_up(codes, exponents, largest, table_ptr, layout: gl.constexpr):
    """Positive values and magnitudes of a tile's codes, as left operands. largest: each row's
    largest exponent."""
    words = codes.load(layout_of_words(codes.shape[0])).reshape([codes.shape[0], 4, 8])
    of_block: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, of_block), assert_trivial=True)
    down = gl.expand_dims(largest, 1) - exponents.load(of_block).to(gl.int32)
    place = table_ptr + gl.minimum(down, _LAST) * 2
    a, b, c, d, e, f, g, h = _magnitudes(words, gl.load(place), gl.load(place + 1))
    return _operand(a, b, c, d, layout), _operand(e, f, g, h, layout)


@gluon.jit
def add_mxfp4_int8_k_steps(
    acc, words, scales, inputs, factors, largest, table_ptr, COUNT: gl.constexpr
):
    """`add_k_steps` with int8 tokens, whose scales are `factors`. acc is 16 times the sums over the
    row's largest power. table_ptr: see `tables`."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    token: gl.constexpr = gl.SliceLayout(0, mma)
    nothing = gl.zeros([ROWS, TOKENS], gl.int32, mma)
    for tile in gl.static_range(COUNT):
        own = words.slice(tile * ROWS, ROWS), of_blocks(scales.slice(tile * ROWS, ROWS))
        positive, every = _looked_up(*own, largest, table_ptr, mma)
        x = inputs.slice(tile * TOKENS, TOKENS).permute((1, 0))
        if TOKENS > MOST_BY_A_WARP:
            more = warpgroup_mma(positive, x, nothing, use_acc=False, is_async=True)
            less = warpgroup_mma(every, x, nothing, use_acc=False, is_async=True)
            more, less = warpgroup_mma_wait(0, deps=[more, less])
        else:
            x = x.load(right)
            more = mma_v2(positive, x, nothing)
            less = mma_v2(every, x, nothing)
        factor = factors.slice(tile * TOKENS, TOKENS).load(token)
        acc += (2 * more - less).to(gl.float32) * factor[None, :]
    return acc
