"""Sums of 4-bit codes for `hopper.py`. Codes become e4m3 in registers, from which the tensor cores
read.

No data moves between threads.

- Integers are e4m3 numbers as they are: n * 2^-9. A plane of codes, one nibble of each word of 64
  rows, is a left operand of 32 inputs. Zero points are subtracted first, as one small product with
  the tokens' sums, which a first step of the rings brings. Sums are in float16, which is finer than
  e4m3 by far: two are scaled in one instruction.
- MXFP4's codes are looked up in a table for each row and block (`e4m3.hopper_mxfp4`): e2m1 values
  times the block's power of two over the row's largest one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
)

from jaxserve_kernels.experts.hopper_lists import BOX, DOWN
from jaxserve_kernels.experts.hopper_sums import (
    no_sums,
    tail,
    times,
    wait,
    waited,
    weight_rows,
)
from jaxserve_kernels.quantized_matmul.e4m3.hopper_mxfp4 import looked_up, of_blocks
from jaxserve_kernels.quantized_matmul.e4m3.tokens import SUMS
from jaxserve_kernels.quantized_matmul.e4m3.triton import nibble_bytes
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4
from jaxserve_kernels.quantized_matmul.triton_unpack import each, power

_BOX = gl.constexpr(BOX)
_INT4 = gl.constexpr(INT4.value)
_SUMS = gl.constexpr(SUMS)
_INTEGERS = gl.constexpr(512.0)
"""What integers are divided by if their bits are read as e4m3."""


@gluon.jit
def four_bit_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr, rings, begin, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`hopper_sums.shared_sums` of 4-bit codes, with a step for each 128 inputs. `begin`:
    `begin_of` the part's rows.

    All products end in their step: the next one overwrites registers that they read, which the
    compiler does not prevent in a loop. Meanwhile the other warpgroups multiply.
    """
    GATHER: gl.constexpr = GATED != DOWN
    if KIND == _INT4:
        main, short, at = _integer_sums(
            part, PARTS, OWN, rings, begin, at, k, STAGES, TOKENS, TAIL, GATHER, ZERO
        )
    else:
        main, short, at = _looked_up_sums(
            part, PARTS, OWN, rings, begin, at, k, STAGES, TOKENS, TAIL, GATHER
        )
    return main, short, at


@gluon.jit
def _looked_up_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr, rings, begin, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    """`four_bit_sums` of MXFP4. A row's codes have its largest exponent in all steps."""
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    main, short = no_sums(PARTS, OWN, TOKENS, 32)
    layout: gl.constexpr = main.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    largest = gl.convert_layout(begin[0].to(gl.int32), row, assert_trivial=True)
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        tile = stage * PARTS + part
        codes = looked_up(w_ring.index(tile), of_blocks(s_ring.index(tile)), largest)
        codes = gl.convert_layout(codes, operand, assert_trivial=True)
        main, short = _add(codes, x_ring, t_ring, stage, main, short, TAIL)
        main, short = waited(main, short, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    main, short = times(main, short, power(gl.maximum(largest - 6, 0)))
    return main, short, at


@gluon.jit
def _integer_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr, rings, begin, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATHER: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`four_bit_sums` of integers, in float16.

    A step's products have sums of their own, which are added to the totals with the step's scale of
    their row, two in one instruction. Both together take as many registers as one accumulator in
    float32. Scales are divided by `_unit`, so that no total overflows.
    """
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    main, short = no_sums(PARTS, OWN, TOKENS, 32)
    layout: gl.constexpr = main.type.layout
    of_short: gl.constexpr = short.type.layout
    unit = _unit(begin, k // 128, ZERO)
    inverse = _inverse(unit)
    stage = at % STAGES
    wait(ready.index(stage), (at // STAGES) & 1, GATHER)
    main, short = _zero_sums(rings, stage, _zeros(begin, inverse, ZERO), PARTS, TOKENS, TAIL)
    mbarrier.arrive(free.index(stage), count=1)
    at += 1
    main, short = _in_pairs(main, layout), _in_pairs(short, of_short)
    row: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    inverse = gl.convert_layout(inverse, row, assert_trivial=True)
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        tile = stage * PARTS + part
        scale = s_ring.index(tile).load(row) * inverse
        codes = _integers(w_ring.index(tile), layout)
        none = gl.zeros([OWN, TOKENS], gl.float16, layout)
        none_short = gl.zeros([OWN, _BOX], gl.float16, of_short)
        sums, last = _add(codes, x_ring, t_ring, stage, none, none_short, TAIL)
        if TAIL:
            sums, last = waited(pairs_under_way(sums), pairs_under_way(last), 0, TAIL)
        else:
            sums, last = waited(pairs_under_way(sums), short, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        main = _plus(main, sums, scale)
        if TAIL:
            short = _plus(short, last, scale)
        at += 1
    factor = gl.convert_layout(unit * _INTEGERS, gl.SliceLayout(1, layout), assert_trivial=True)
    main, short = times(_of_pairs(main, layout), _of_pairs(short, of_short), factor)
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
def _inverse(rows):
    """1 / rows, except for the last bit. An exact division takes ten instructions."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [rows], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _plus(total, sums, rows):
    """total + sums * rows of pairs in float16, rounded once. rows: a factor for each row."""
    row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    factor = gl.convert_layout(_pair(rows, rows), row, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r", [sums, each(factor, sums.shape), total], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pair(low, high):
    """Two of float32 as a word of two of float16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


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
def begin_of(
    factors, first, second: gl.constexpr, all_rows: gl.constexpr, OWN: gl.constexpr,
    k: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """What the sums of a part's rows begin with, from row `first` on (`weight_rows`). Of integers,
    each group's scales and zero points. Of MXFP4, each row's largest exponent."""
    scale_ptr, second_ptr = factors
    if KIND == _INT4:
        groups: gl.constexpr = k // 128
        most: gl.constexpr = (groups + 15) // 16 * 16
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
        lane = gl.arange(0, OWN, gl.SliceLayout(1, left))
        row = gl.expand_dims(weight_rows(first, second, lane, all_rows, GATED), 1)
        group = gl.expand_dims(gl.arange(0, most, gl.SliceLayout(0, left)), 0)
        place = row // 64 * (groups * 64) + row % 64 + group * 64
        known, _ = gl.broadcast(group < groups, place)
        found = (gl.load(scale_ptr + place, mask=known, other=0.0),)
        if ZERO:
            found = found[0], gl.load(second_ptr + place, mask=known, other=0)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
        lane = gl.arange(0, OWN, gl.SliceLayout(1, layout))
        found = (gl.load(second_ptr + weight_rows(first, second, lane, all_rows, GATED)),)
    return found


@gluon.jit
def _add(codes, x_ring, t_ring, stage, main, short, TAIL: gl.constexpr):
    """Adds the products of codes to the sums. They run on."""
    TOKENS: gl.constexpr = main.shape[1]
    x = x_ring.index(stage).slice(0, TOKENS, dim=0)
    main = warpgroup_mma(codes, x.permute((1, 0)), main, is_async=True)
    if TAIL:
        x = tail(x_ring.index(stage), t_ring.index(stage), TOKENS)
        again: gl.constexpr = gl.DotOperandLayout(0, short.type.layout, 4)
        codes = gl.convert_layout(codes, again, assert_trivial=True)
        short = warpgroup_mma(codes, x.permute((1, 0)), short, is_async=True)
    return main, short


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
