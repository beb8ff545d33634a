"""Looks up MXFP4's codes in shared memory, as e4m3 in registers that Hopper's tensor cores read.

A thread has one of the four blocks of each of its rows: 16 bytes, which are one load, and 32 codes,
for which one table is enough. Eight codes take nine instructions. No data moves between threads.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.quantized_matmul.triton_unpack import each


@gluon.constexpr_function
def layout_of_words(rows: Any) -> Any:
    """Layout of words [rows, 32] of a warpgroup. A thread has rows as in a left operand; 32 rows
    are half of one."""
    more = {32: [], 64: [8], 128: [8, 64]}[rows]
    registers = [[0, 1], [0, 2], [0, 4], *([row, 0] for row in more)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[8, 0], [16, 0]] if rows == 32 else [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 32])


@gluon.jit
def of_blocks(scales):
    """A ring's place of words [rows] of four exponents as [rows, 4], a byte for each block."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return scales.reinterpret(gl.uint8, [scales.shape[0], 4], plain)


@gluon.jit
def looked_up(codes, exponents, largest):
    """Codes of 128 inputs, [rows, 128]: e2m1 values times 64 times 2^(exponent - largest), in the
    order `tokens.Order.EIGHTHS`. codes, exponents: words [rows, 32] and `of_blocks` in shared
    memory. largest: each row's largest exponent.

    A value of the largest block is at most 384. So blocks with up to 2^-11 of its power are exact,
    and smaller ones count as 2^-12, without their 0.5.
    """
    rows: gl.constexpr = codes.shape[0]
    words = codes.load(layout_of_words(rows)).reshape([rows, 4, 8])
    of_block: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, of_block), assert_trivial=True)
    down = gl.expand_dims(largest, 1) - exponents.load(of_block).to(gl.int32)
    a, b, c, d = _bytes(words, gl.minimum(down, 12))
    both = gl.join(gl.join(a, c), gl.join(b, d)).reshape([rows, 4, 2, 4, 2, 2])
    both = both.permute((0, 2, 4, 5, 1, 3)).reshape([rows, 128])
    return both.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _bytes(words, down):
    """Four words of a block become four registers of bytes, each with the codes of one word.

    Tables have e2m1's magnitudes times 64 times 2^-down: 0, 0.5, 1 and 1.5; 2, 3, 4 and 6.
    """
    few, many = 0x6C686000 - down * 0x08080800, 0x7C787470 - down * 0x08080808
    return gl.inline_asm_elementwise(
        """{ .reg .b32 x, s, up;
        shl.b32 up, $4, 4; and.b32 x, $4, 0x77777777;
        prmt.b32 s, up, $4, 0x5140; prmt.b32 $0, $6, $10, x; lop3.b32 $0, s, 0x80808080, $0, 0xea;
        shr.u32 x, x, 16;
        prmt.b32 s, up, $4, 0x7362; prmt.b32 $1, $6, $10, x; lop3.b32 $1, s, 0x80808080, $1, 0xea;
        shl.b32 up, $5, 4; and.b32 x, $5, 0x77777777;
        prmt.b32 s, up, $5, 0x5140; prmt.b32 $2, $6, $10, x; lop3.b32 $2, s, 0x80808080, $2, 0xea;
        shr.u32 x, x, 16;
        prmt.b32 s, up, $5, 0x7362; prmt.b32 $3, $6, $10, x; lop3.b32 $3, s, 0x80808080, $3, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [words, each(few, words.shape), each(many, words.shape)],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
