"""Sums of 4-bit codes for `hopper.py`. Codes become e4m3 in registers, from which the tensor cores
read.

A plane of codes, one nibble of each word of 64 rows, is a left operand of 32 inputs. No data moves
between threads.

- Integers are e4m3 numbers as they are: n * 2^-9. Zero points are subtracted first, as one small
  product with the tokens' sums, which a first step of the rings brings.
- MXFP4's codes are looked up in a table for each row and block: e2m1 values times the block's power
  of two over the row's largest one.
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
from jaxserve_kernels.quantized_matmul.e4m3.tokens import SUMS
from jaxserve_kernels.quantized_matmul.e4m3.triton import nibble_bytes
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4
from jaxserve_kernels.quantized_matmul.triton_unpack import each, power

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
        words = s_ring.index(tile).load(row)
        if KIND == _INT4:
            before = scale
            scale = divisor(words)
            main, short = times(main, short, quotient(before, scale))
        codes = _unpacked(w_ring.index(tile), words, scale, layout, KIND)
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
def _unpacked(tile, words, scale, mma: gl.constexpr, KIND: gl.constexpr):
    """Codes of a part's rows as a left operand, [HALF, 128]."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    codes = tile.load(operand)
    if KIND == _INT4:
        planes = nibble_bytes(codes)
    else:
        words = gl.convert_layout(words, gl.SliceLayout(1, operand), assert_trivial=True)
        largest = gl.convert_layout(scale, gl.SliceLayout(1, operand), assert_trivial=True)
        planes = _looked_up(codes, words, largest)
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


@gluon.jit
def _looked_up(codes, words, largest):
    """Four planes of MXFP4's codes as e4m3: e2m1 values times 64 times 2^(exponent - largest).

    A value of the largest block is at most 384. So blocks with up to 2^-11 of its power are exact,
    and smaller ones count as 2^-12, without their 0.5. Of four words the second and the third
    change places: see `tokens.Order.SWAPPED`.
    """
    shape: gl.constexpr = codes.shape
    few0, many0 = _table(words, largest, 0)
    few1, many1 = _table(words, largest, 1)
    few2, many2 = _table(words, largest, 2)
    few3, many3 = _table(words, largest, 3)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a, b, x, s;
        shl.b32 a, $4, 4; shl.b32 b, $5, 4;
        lop3.b32 x, $4, b, 0x0f0f0f0f, 0xe4; and.b32 x, x, 0x77777777; prmt.b32 x, x, x, 0x3120;
        prmt.b32 s, a, b, 0x6240; prmt.b32 $0, $6, $10, x; lop3.b32 $0, s, 0x80808080, $0, 0xea;
        shr.u32 x, x, 16;
        prmt.b32 s, a, b, 0x7351; prmt.b32 $2, $22, $26, x; lop3.b32 $2, s, 0x80808080, $2, 0xea;
        shr.u32 a, $4, 4;
        lop3.b32 x, a, $5, 0x0f0f0f0f, 0xe4; and.b32 x, x, 0x77777777; prmt.b32 x, x, x, 0x3120;
        prmt.b32 s, $4, $5, 0x6240; prmt.b32 $1, $14, $18, x; lop3.b32 $1, s, 0x80808080, $1, 0xea;
        shr.u32 x, x, 16;
        prmt.b32 s, $4, $5, 0x7351; prmt.b32 $3, $30, $34, x; lop3.b32 $3, s, 0x80808080, $3, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,r,r" + ",r" * 32,
        [codes, each(few0, shape), each(many0, shape), each(few1, shape), each(many1, shape),
         each(few2, shape), each(many2, shape), each(few3, shape), each(many3, shape)],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _table(words, largest, block: gl.constexpr):
    """e2m1 magnitudes times 64 of a block, as e4m3 bytes: 0, 0.5, 1, 1.5 and 2, 3, 4, 6."""
    down = gl.minimum(largest - ((words >> (8 * block)) & 0xFF).to(gl.int32), 12)
    return 0x6C686000 - down * 0x08080800, 0x7C787470 - down * 0x08080808
