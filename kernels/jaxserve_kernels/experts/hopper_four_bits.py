"""Sums of 4-bit codes for `hopper.py`. Codes become e4m3 in registers, from which the tensor cores
read.

No data moves between threads.

- Integers are e4m3 numbers as they are: n * 2^-9. A plane of codes, one nibble of each word of 64
  rows, is a left operand of 32 inputs. Zero points are subtracted first, as one small product with
  the tokens' sums, which a first step of the rings brings.
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

from jaxserve_kernels.experts.hopper_lists import DOWN
from jaxserve_kernels.experts.hopper_sums import (
    divisor,
    no_sums,
    quotient,
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
from jaxserve_kernels.quantized_matmul.triton_unpack import power

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

    Integers' sums are divided by the step's scale of their row before its products are added, so
    that one accumulator is enough. All products end in their step: the next one overwrites
    registers that they read, which the compiler does not prevent in a loop. Meanwhile the other
    warpgroups multiply.
    """
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    GATHER: gl.constexpr = GATED != DOWN
    main, short = no_sums(PARTS, OWN, TOKENS, 32)
    layout: gl.constexpr = main.type.layout
    row: gl.constexpr = gl.SliceLayout(1, layout)
    scale = _first(begin, KIND, row)
    if KIND == _INT4:
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        main, short = _less_zeros(rings, stage, _zeros(begin, ZERO), main, short, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        tile = stage * PARTS + part
        if KIND == _INT4:
            before = scale
            scale = divisor(s_ring.index(tile).load(row))
            main, short = times(main, short, quotient(before, scale))
            codes = _integers(w_ring.index(tile), layout)
        else:
            codes = looked_up(w_ring.index(tile), of_blocks(s_ring.index(tile)), scale)
            operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
            codes = gl.convert_layout(codes, operand, assert_trivial=True)
        main, short = _add(codes, x_ring, t_ring, stage, main, short, TAIL)
        main, short = waited(main, short, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    main, short = times(main, short, _factor(scale, KIND))
    return main, short, at


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
def _first(begin, KIND: gl.constexpr, row: gl.constexpr):
    """The scale of each row's sums before the first step. For MXFP4 it is the row's largest
    exponent, in all steps."""
    if KIND == _INT4:
        scale = gl.full([begin[0].shape[0]], 1 / _INTEGERS, gl.float32, row)
    else:
        scale = gl.convert_layout(begin[0].to(gl.int32), row, assert_trivial=True)
    return scale


@gluon.jit
def _factor(scale, KIND: gl.constexpr):
    """What sums are multiplied by after the last step. Codes were 2^-9 and 2^6 of their values."""
    return scale * _INTEGERS if KIND == _INT4 else power(gl.maximum(scale - 6, 0))


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
def _zeros(begin, ZERO: gl.constexpr):
    """Minus scale times zero point of each row and group, as a left operand."""
    zero = begin[1].to(gl.float32) if ZERO else 8.0
    return (-begin[0] * zero).to(gl.bfloat16)


@gluon.jit
def _less_zeros(rings, stage, zeros, main, short, TAIL: gl.constexpr):
    """Subtracts each group's scale times zero point times the tokens' sums."""
    x_ring, t_ring, _, _, _, _ = rings
    groups: gl.constexpr = zeros.shape[1]
    TOKENS: gl.constexpr = main.shape[1]
    layout: gl.constexpr = main.type.layout
    of_short: gl.constexpr = short.type.layout
    all_sums = _sums(x_ring.index(stage), groups)
    main = _times_sums(zeros, all_sums.slice(0, TOKENS, dim=0), main)
    if TAIL:
        sums = tail(all_sums, _sums(t_ring.index(stage), groups), TOKENS)
        short = _times_sums(zeros, sums, short)
    main, short = waited(main, short, 0, TAIL)
    main = gl.convert_layout(main, layout, assert_trivial=True)
    return main, gl.convert_layout(short, of_short, assert_trivial=True)


@gluon.jit
def _sums(panel, groups: gl.constexpr):
    """The tokens' sums, [tokens, groups], in a panel."""
    in_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return panel.reinterpret(gl.bfloat16, [panel.shape[0], _SUMS], in_bytes).slice(0, groups, dim=1)


@gluon.jit
def _times_sums(zeros, sums, acc):
    """Adds zeros times sums. Runs on, in a layout of products of 16 inputs."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1], 16])
    zeros = gl.convert_layout(zeros, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    return warpgroup_mma(zeros, sums.permute((1, 0)), acc, is_async=True)
