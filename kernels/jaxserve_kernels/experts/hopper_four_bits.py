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

from jaxserve_kernels.experts.hopper_sums import (
    divisor,
    no_sums,
    piece,
    quotient,
    rows_from,
    tail,
    times,
    wait,
    waited,
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
    part: gl.constexpr, HALF: gl.constexpr, rings, left_begin, right_begin, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATHER: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """`hopper_sums.shared_sums` of 4-bit codes, with a step for each 128 inputs. `left_begin` and
    `right_begin`: `begin_of` the halves.

    Integers' sums are divided by the step's scale of their row before its products are added, so
    that one accumulator is enough. All products end in their step: the next one overwrites
    registers that they read, which the compiler does not prevent in a loop. Meanwhile the other
    warpgroup multiplies.
    """
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    left, short_left = no_sums(HALF, TOKENS, 32)
    right, short_right = no_sums(HALF, TOKENS, 32)
    layout: gl.constexpr = left.type.layout
    row: gl.constexpr = gl.SliceLayout(1, layout)
    left_scale = _first(left_begin, KIND, row)
    right_scale = _first(right_begin, KIND, row)
    if KIND == _INT4:
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        sums = left, right, short_left, short_right
        zeros = _zeros(left_begin, ZERO), _zeros(right_begin, ZERO)
        left, right, short_left, short_right = _less_zeros(rings, stage, zeros, sums, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        tile = piece(stage, 0, part, HALF)
        other = piece(stage, 1, part, HALF)
        left_words = s_ring.index(tile).load(row)
        right_words = s_ring.index(other).load(row)
        if KIND == _INT4:
            before = left_scale, right_scale
            left_scale, right_scale = divisor(left_words), divisor(right_words)
            left, short_left = times(left, short_left, quotient(before[0], left_scale))
            right, short_right = times(right, short_right, quotient(before[1], right_scale))
        codes = _unpacked(w_ring.index(tile), left_words, left_scale, layout, KIND)
        left, short_left = _add(codes, x_ring, t_ring, stage, left, short_left, TAIL)
        codes = _unpacked(w_ring.index(other), right_words, right_scale, layout, KIND)
        right, short_right = _add(codes, x_ring, t_ring, stage, right, short_right, TAIL)
        left, right, short_left, short_right = waited(left, right, short_left, short_right, 0, TAIL)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    left, short_left = times(left, short_left, _factor(left_scale, KIND))
    right, short_right = times(right, short_right, _factor(right_scale, KIND))
    return left, right, short_left, short_right, at


@gluon.jit
def begin_of(
    factors, first, all_rows: gl.constexpr, HALF: gl.constexpr, k: gl.constexpr,
    KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """What the sums of HALF rows begin with, from row `first` on. Of integers, each group's scales
    and zero points. Of MXFP4, each row's largest exponent."""
    scale_ptr, second_ptr = factors
    if KIND == _INT4:
        groups: gl.constexpr = k // 128
        most: gl.constexpr = (groups + 15) // 16 * 16
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [HALF // 16, 1], [16, 64, 16])
        left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
        row = gl.expand_dims(rows_from(first, all_rows, HALF, gl.SliceLayout(1, left)), 1)
        group = gl.expand_dims(gl.arange(0, most, gl.SliceLayout(0, left)), 0)
        place = row // 64 * (groups * 64) + row % 64 + group * 64
        known, _ = gl.broadcast(group < groups, place)
        found = (gl.load(scale_ptr + place, mask=known, other=0.0),)
        if ZERO:
            found = found[0], gl.load(second_ptr + place, mask=known, other=0)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [HALF // 16, 1], [16, 64, 32])
        row = rows_from(first, all_rows, HALF, gl.SliceLayout(1, layout))
        found = (gl.load(second_ptr + row),)
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
def _less_zeros(rings, stage, zeros, acc, TAIL: gl.constexpr):
    """Subtracts each group's scale times zero point times the tokens' sums. Waits for all of these
    products together."""
    x_ring, t_ring, _, _, _, _ = rings
    left, right, short_left, short_right = acc
    TOKENS: gl.constexpr = left.shape[1]
    groups: gl.constexpr = zeros[0].shape[1]
    layout: gl.constexpr = left.type.layout
    short: gl.constexpr = short_left.type.layout
    all_sums = _sums(x_ring.index(stage), groups)
    sums = all_sums.slice(0, TOKENS, dim=0)
    left = _times_sums(zeros[0], sums, left)
    right = _times_sums(zeros[1], sums, right)
    if TAIL:
        sums = tail(all_sums, _sums(t_ring.index(stage), groups), TOKENS)
        short_left = _times_sums(zeros[0], sums, short_left)
        short_right = _times_sums(zeros[1], sums, short_right)
    left, right, short_left, short_right = waited(left, right, short_left, short_right, 0, TAIL)
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    short_left = gl.convert_layout(short_left, short, assert_trivial=True)
    short_right = gl.convert_layout(short_right, short, assert_trivial=True)
    return left, right, short_left, short_right


@gluon.jit
def _sums(panel, groups: gl.constexpr):
    """The tokens' sums, [tokens, groups], in a panel."""
    in_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return panel.reinterpret(gl.bfloat16, [panel.shape[0], _SUMS], in_bytes).slice(0, groups, dim=1)


@gluon.jit
def _times_sums(zeros, sums, acc):
    """Adds zeros times sums. Runs on, in a layout of products of 16 inputs."""
    warps: gl.constexpr = acc.shape[0] // 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, acc.shape[1], 16])
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
