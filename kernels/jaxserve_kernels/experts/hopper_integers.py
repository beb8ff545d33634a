"""Sums of 4-bit integers for `hopper_four_bits.py`, in float16: two are scaled in one instruction.
That is finer than e4m3 by far.

Integers are e4m3 numbers as they are: n * 2^-9. A plane of codes, one nibble of each word of 64
rows, is a left operand of 32 inputs. Zero points are subtracted first, as one small product with
the tokens' sums, which a first step of the rings brings.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
)

from jaxserve_kernels.experts.hopper_lists import BOX
from jaxserve_kernels.experts.hopper_sums import (
    add_products,
    no_sums,
    reciprocal,
    tail,
    times,
    wait,
    waited,
)
from jaxserve_kernels.quantized_matmul.e4m3.tokens import SUMS
from jaxserve_kernels.quantized_matmul.e4m3.triton import nibble_bytes
from jaxserve_kernels.quantized_matmul.triton_unpack import each

_BOX = gl.constexpr(BOX)
_SUMS = gl.constexpr(SUMS)
_INTEGERS = gl.constexpr(512.0)
"""What integers are divided by if their bits are read as e4m3."""


@gluon.jit
def integer_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr, rings, begin, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATHER: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`four_bit_sums` of integers, in float16.

    A step's products have sums of their own, which are added to the totals with the step's scale of
    their row, two in one instruction. Both together take as many registers as one accumulator in
    float32. Scales are divided by `_unit`, so that no total overflows.
    """
    _, _, _, _, ready, free = rings
    unit = _unit(begin, k // 128, ZERO)
    inverse = reciprocal(unit)
    stage = at % STAGES
    wait(ready.index(stage), (at // STAGES) & 1, GATHER)
    main, short = _zero_sums(rings, stage, _zeros(begin, inverse, ZERO), PARTS, TOKENS, TAIL)
    mbarrier.arrive(free.index(stage), count=1)
    at += 1
    if OWN == 128:
        main, short, at = _steps_in_turns(
            part, PARTS, rings, inverse, main, short, at, k, STAGES, TAIL, GATHER
        )
    else:
        main, short, at = _steps(
            part, PARTS, rings, inverse, main, short, at, k, STAGES, TAIL, GATHER
        )
    row: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    main, short = times(main, short, gl.convert_layout(unit * _INTEGERS, row, assert_trivial=True))
    return main, short, at


@gluon.jit
def _steps(
    part: gl.constexpr, PARTS: gl.constexpr, rings, inverse, main, short, at,
    k: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Adds all steps to main and short. inverse: of each row's unit."""
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    none, none_short = _no_halves(main.shape[0], main.shape[1], PARTS)
    layout: gl.constexpr = none.type.layout
    of_short: gl.constexpr = none_short.type.layout
    main, short = _in_pairs(main, layout), _in_pairs(short, of_short)
    row: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    inverse = gl.convert_layout(inverse, row, assert_trivial=True)
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        tile = stage * PARTS + part
        scale = s_ring.index(tile).load(row) * inverse
        codes = _integers(w_ring.index(tile), layout)
        sums, last = add_products(codes, x_ring, t_ring, stage, none, none_short, TAIL)
        sums, last = _waited(sums, last, short, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        main, short = _plus(main, short, sums, last, scale, TAIL)
        at += 1
    return _of_pairs(main, layout), _of_pairs(short, of_short), at


@gluon.jit
def _steps_in_turns(
    part: gl.constexpr, PARTS: gl.constexpr, rings, inverse, main, short, at,
    k: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """`_steps` of two halves of the rows: one is scaled while the other multiplies."""
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    HALF: gl.constexpr = main.shape[0] // 2
    none, none_short = _no_halves(HALF, main.shape[1], PARTS)
    layout: gl.constexpr = none.type.layout
    of_short: gl.constexpr = none_short.type.layout
    main_a, main_b = _row_halves(main)
    short_a, short_b = _row_halves(short)
    main_a, main_b = _in_pairs(main_a, layout), _in_pairs(main_b, layout)
    short_a, short_b = _in_pairs(short_a, of_short), _in_pairs(short_b, of_short)
    row: gl.constexpr = gl.SliceLayout(1, main_a.type.layout)
    inverse_a, inverse_b = gl.split(inverse.reshape([2, HALF]).permute((1, 0)))
    inverse_a = gl.convert_layout(inverse_a, row, assert_trivial=True)
    inverse_b = gl.convert_layout(inverse_b, row, assert_trivial=True)
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        rows, scales = w_ring.index(stage * PARTS + part), s_ring.index(stage * PARTS + part)
        scale_a = scales.slice(0, HALF).load(row) * inverse_a
        scale_b = scales.slice(HALF, HALF).load(row) * inverse_b
        codes = _integers(rows.slice(0, HALF), layout)
        sums_a, last_a = add_products(codes, x_ring, t_ring, stage, none, none_short, TAIL)
        codes = _integers(rows.slice(HALF, HALF), layout)
        sums_b, last_b = add_products(codes, x_ring, t_ring, stage, none, none_short, TAIL)
        sums_a, last_a = _waited(sums_a, last_a, short_a, 2 if TAIL else 1, TAIL)
        main_a, short_a = _plus(main_a, short_a, sums_a, last_a, scale_a, TAIL)
        sums_b, last_b = _waited(sums_b, last_b, short_b, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        main_b, short_b = _plus(main_b, short_b, sums_b, last_b, scale_b, TAIL)
        at += 1
    main = _both_halves(_of_pairs(main_a, layout), _of_pairs(main_b, layout))
    short = _both_halves(_of_pairs(short_a, of_short), _of_pairs(short_b, of_short))
    return main, short, at


@gluon.jit
def _unit(begin, groups: gl.constexpr, ZERO: gl.constexpr):
    """What each row's scales are divided by, so that no total overflows.

    Divided, a group's largest weight is at most 16, and its sum 16 / 512 * 448 * 128. 32 of these
    are 57,344. Zero points that are not from 0 to 15 give larger weights than codes.
    """
    scale = gl.abs(begin[0])
    if ZERO:
        scale *= (gl.abs(begin[1].to(gl.float32) - 7.5) + 7.5) * 0.0625
    many: gl.constexpr = 1.0 if groups <= 32 else 2.0 if groups <= 64 else 4.0
    return gl.maximum(gl.max(scale, axis=1), 1e-18) * many


@gluon.jit
def _zeros(begin, inverse, ZERO: gl.constexpr):
    """Minus scale times zero point of each row and group, in the unit of sums, as a left
    operand."""
    zero = begin[1].to(gl.float32) if ZERO else 8.0
    return (begin[0] * (zero * gl.expand_dims(inverse * (-1 / _INTEGERS), 1))).to(gl.bfloat16)


@gluon.jit
def _zero_sums(
    rings, stage, zeros, PARTS: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Zeros times the tokens' sums."""
    x_ring, t_ring, _, _, _, _ = rings
    groups: gl.constexpr = zeros.shape[1]
    main, short = no_sums(PARTS, zeros.shape[0], TOKENS, 16)
    all_sums = _sums(x_ring.index(stage), groups)
    main = _times_sums(zeros, all_sums.slice(0, TOKENS, dim=0), main)
    if TAIL:
        sums = tail(all_sums, _sums(t_ring.index(stage), groups), TOKENS)
        short = _times_sums(zeros, sums, short)
    return waited(main, short, 0, TAIL)


@gluon.jit
def _sums(panel, groups: gl.constexpr):
    """The tokens' sums, [tokens, groups], in a panel."""
    in_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return panel.reinterpret(gl.bfloat16, [panel.shape[0], _SUMS], in_bytes).slice(0, groups, dim=1)


@gluon.jit
def _times_sums(zeros, sums, acc):
    """Adds zeros times sums. Runs on."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    zeros = gl.convert_layout(zeros, operand, assert_trivial=True)
    return warpgroup_mma(zeros, sums.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _integers(tile, mma: gl.constexpr):
    """Codes of a part's rows as a left operand, [OWN, 128]."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    codes = tile.load(operand)
    planes = nibble_bytes(codes)
    both = gl.join(gl.join(planes[0], planes[2]), gl.join(planes[1], planes[3]))
    joined = both.permute((0, 2, 3, 1)).reshape([codes.shape[0], 128])
    joined = joined.to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(joined, operand, assert_trivial=True)


@gluon.jit
def _no_halves(rows: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr):
    """`no_sums` in float16, of 32 inputs."""
    main, short = no_sums(PARTS, rows, TOKENS, 32)
    layout: gl.constexpr = main.type.layout
    of_short: gl.constexpr = short.type.layout
    none = gl.zeros([rows, TOKENS], gl.float16, layout)
    return none, gl.zeros([rows, _BOX], gl.float16, of_short)


@gluon.jit
def _waited(sums, last, short, behind: gl.constexpr, TAIL: gl.constexpr):
    """Sums and last in pairs, after all products but the last `behind` are done. Without TAIL,
    short in place of last."""
    sums = pairs_under_way(sums)
    last = pairs_under_way(last) if TAIL else short
    return waited(sums, last, behind, TAIL)


@gluon.jit
def pairs_under_way(acc):
    """An accumulator in float16 whose products may run, as words of two neighbours: [rows, n / 2].

    A word is a register as it is, so nothing is read. But in a wait for the accumulator itself each
    half of a register is a value of its own, for which ptxas sees it read (C7514: then no product
    runs on).
    """
    bits = gl.tensor(acc.handle, acc.type.tensor_type).to(gl.uint16, bitcast=True)
    low, high = gl.split(bits.reshape([bits.shape[0], bits.shape[1] // 2, 2]))
    return low.to(gl.uint32) | (high.to(gl.uint32) << 16)


@gluon.jit
def _plus(main, short, sums, last, rows, TAIL: gl.constexpr):
    """main + sums * rows and short + last * rows, in pairs. rows: a factor for each row."""
    factor = _pair(rows, rows)
    main = _fused(sums, factor, main)
    if TAIL:
        short = _fused(last, factor, short)
    return main, short


@gluon.jit
def _fused(sums, rows, total):
    """total + sums * rows in pairs, rounded once."""
    row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    factor = each(gl.convert_layout(rows, row, assert_trivial=True), sums.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r", [sums, factor, total], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pair(low, high):
    """Two of float32 as a word of two of float16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _in_pairs(sums, layout: gl.constexpr):
    """Sums in float32 [rows, n], in a layout of products, as words of two of float16."""
    sums = gl.convert_layout(sums, layout, assert_trivial=True)
    low, high = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    return _pair(low, high)


@gluon.jit
def _of_pairs(words, layout: gl.constexpr):
    """The inverse of `_in_pairs`."""
    low = (words & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True)
    high = (words >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
    both = gl.join(low, high).to(gl.float32)
    both = both.reshape([words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _row_halves(values):
    """The first half of the rows, and the second."""
    rows: gl.constexpr = values.shape[0] // 2
    return gl.split(values.reshape([2, rows, values.shape[1]]).permute((1, 2, 0)))


@gluon.jit
def _both_halves(first, second):
    """The inverse of `_row_halves`, in the layout of both."""
    both = gl.join(first, second).permute((2, 0, 1))
    both = both.reshape([2 * first.shape[0], first.shape[1]])
    return gl.convert_layout(both, first.type.layout, assert_trivial=True)
