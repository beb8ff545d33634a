"""Sums of 4-bit codes for `hopper.py`. Codes become e4m3 in registers, from which the tensor cores
read.

No data moves between threads.

- Integers are e4m3 numbers as they are: see `hopper_integers`.
- MXFP4's codes are looked up in a table for each row and block (`e4m3.hopper_mxfp4`): e2m1 values
  times the block's power of two over the row's largest one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxserve_kernels.experts.hopper_integers import integer_sums
from jaxserve_kernels.experts.hopper_lists import DOWN
from jaxserve_kernels.experts.hopper_sums import (
    add_products,
    no_sums,
    times,
    wait,
    waited,
    weight_rows,
)
from jaxserve_kernels.quantized_matmul.e4m3.hopper_mxfp4 import looked_up, of_blocks
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4
from jaxserve_kernels.quantized_matmul.triton_unpack import power

_INT4 = gl.constexpr(INT4.value)


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
        main, short, at = integer_sums(
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
        main, short = add_products(codes, x_ring, t_ring, stage, main, short, TAIL)
        main, short = waited(main, short, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    main, short = times(main, short, power(gl.maximum(largest - 6, 0)))
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
