"""The products of one warpgroup of `hopper.py`: its rows of a weight times the tokens of a tile.

Quantised weights are converted in the registers that the tensor cores read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.experts.hopper_copy import BOX, DEPTH, MAIN, ROWS
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, INT8, MXFP4, OTHER
from jaxserve_kernels.quantized_matmul.triton_unpack import (
    MXFP4_POWER,
    e2m1_times,
    e4m3_pair,
    each,
    int8_pair,
    less_zero,
    mxfp4_factors,
    nibbles,
)

_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
_DEPTH = gl.constexpr(DEPTH)
_ROWS = gl.constexpr(ROWS)
HALF = gl.constexpr(ROWS // 2)
"""Rows of a warpgroup, of either half of a tile."""
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16]))
SHORT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 16]))
"""Layouts of sums: of the MAIN tokens that each tile has, and of the BOX more that it may have."""
_LEFT = gl.constexpr(gl.DotOperandLayout(0, LAYOUT.value, 2))
_SHORT_LEFT = gl.constexpr(gl.DotOperandLayout(0, SHORT.value, 2))
_ROW = gl.constexpr(gl.SliceLayout(1, _LEFT.value))
PLAIN = gl.constexpr(-2)
"""Stands for an unquantised weight where a `weights.Kind` is expected."""
_OTHER = gl.constexpr(OTHER.value)
_INT8 = gl.constexpr(INT8.value)
_INT4 = gl.constexpr(INT4.value)
_MXFP4 = gl.constexpr(MXFP4.value)


@gluon.jit
def plain_sums(
    part: gl.constexpr, x_ring, t_ring, w_ring, ready, free, at,
    k: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Returns the sums of both halves of a tile, [HALF, _MAIN] and [HALF, _BOX], from step `at` of
    the rings on; and the step after the tile."""
    left = gl.zeros([HALF, _MAIN], gl.float32, LAYOUT)
    right = gl.zeros([HALF, _MAIN], gl.float32, LAYOUT)
    short_left = gl.zeros([HALF, _BOX], gl.float32, SHORT)
    short_right = gl.zeros([HALF, _BOX], gl.float32, SHORT)
    for step in range(k // _DEPTH):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        x = x_ring.index(stage).permute((1, 0))
        w_left = w_ring.index(stage).slice(part * HALF, HALF, dim=0)
        w_right = w_ring.index(stage).slice(_ROWS + part * HALF, HALF, dim=0)
        left = warpgroup_mma(w_left, x, left, is_async=True)
        right = warpgroup_mma(w_right, x, right, is_async=True)
        if TAIL:
            x = t_ring.index(stage).permute((1, 0))
            short_left = warpgroup_mma(w_left, x, short_left, is_async=True)
            short_right = warpgroup_mma(w_right, x, short_right, is_async=True)
            left, right, short_left, short_right = warpgroup_mma_wait(
                4, deps=[left, right, short_left, short_right]
            )
        else:
            left, right = warpgroup_mma_wait(2, deps=[left, right])
        # The products of the previous step are done, so its ring stage is free.
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        at += 1
    if TAIL:
        left, right, short_left, short_right = warpgroup_mma_wait(
            0, deps=[left, right, short_left, short_right]
        )
    else:
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    return left, right, short_left, short_right, at


@gluon.jit
def code_sums(
    part: gl.constexpr, x_ring, t_ring, w_ring, ready, free, scale_ptr, zero_ptr, left_tile,
    right_tile, at, k: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, UNPACK: gl.constexpr,
):  # fmt: skip
    """`plain_sums` of codes, with a scale per 128 inputs or per row. The tiles of codes are those
    of the warpgroup's rows. While one warpgroup converts codes, the other one multiplies."""
    SCALED: gl.constexpr = KIND >= _INT4 or k > GROUP  # else rows have scales
    steps: gl.constexpr = k // 128
    left = gl.zeros([HALF, _MAIN], gl.float32, LAYOUT)
    right = gl.zeros([HALF, _MAIN], gl.float32, LAYOUT)
    short_left = gl.zeros([HALF, _BOX], gl.float32, SHORT)
    short_right = gl.zeros([HALF, _BOX], gl.float32, SHORT)
    left_at = left_tile * (steps * 64) + gl.arange(0, 64, _ROW)
    right_at = right_tile * (steps * 64) + gl.arange(0, 64, _ROW)
    left_scales = _scales(scale_ptr, zero_ptr, left_at, 0, SCALED, ZERO)
    right_scales = _scales(scale_ptr, zero_ptr, right_at, 0, SCALED, ZERO)
    for step in range(steps):
        stage = at % STAGES
        later = gl.minimum(step + 1, steps - 1)
        left_later = _scales(scale_ptr, zero_ptr, left_at, later, SCALED, ZERO)
        right_later = _scales(scale_ptr, zero_ptr, right_at, later, SCALED, ZERO)
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        left, short_left = _add_codes(
            w_ring.index(stage * (_ROWS // 32) + part), left_scales, x_ring, t_ring, stage,
            left, short_left, TAIL, KIND, SCALED, ZERO, UNPACK,
        )  # fmt: skip
        right, short_right = _add_codes(
            w_ring.index(stage * (_ROWS // 32) + _ROWS // 64 + part), right_scales, x_ring, t_ring,
            stage, right, short_right, TAIL, KIND, SCALED, ZERO, UNPACK,
        )  # fmt: skip
        mbarrier.arrive(free.index(stage), count=1)
        left_scales, right_scales = left_later, right_later
        at += 1
    if KIND == _MXFP4:
        left, right = left * MXFP4_POWER, right * MXFP4_POWER
        short_left, short_right = short_left * MXFP4_POWER, short_right * MXFP4_POWER
    elif not SCALED:
        left, short_left = _of_rows(left, short_left, scale_ptr + left_tile * 64)
        right, short_right = _of_rows(right, short_right, scale_ptr + right_tile * 64)
    return left, right, short_left, short_right, at


@gluon.jit
def _scales(scale_ptr, zero_ptr, at, step, SCALED: gl.constexpr, ZERO: gl.constexpr):
    """Scales and zero points of a step."""
    scale = 1.0
    if SCALED:
        scale = gl.load(scale_ptr + at + step * 64)
    zero = 8.0
    if ZERO:
        zero = gl.load(zero_ptr + at + step * 64)
    return scale, zero


@gluon.jit
def _of_rows(main, short, scale_ptr):
    scale = gl.load(scale_ptr + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    again = gl.convert_layout(scale, gl.SliceLayout(1, SHORT), assert_trivial=True)
    return main * gl.expand_dims(scale, 1), short * gl.expand_dims(again, 1)


@gluon.jit
def _add_codes(
    codes, scales, x_ring, t_ring, stage, main, short,
    TAIL: gl.constexpr, KIND: gl.constexpr, SCALED: gl.constexpr,
    ZERO: gl.constexpr, UNPACK: gl.constexpr,
):  # fmt: skip
    """Adds the products of 128 inputs of codes to main and short."""
    planes = _unpacked(codes.load(_LEFT), scales, KIND, SCALED, ZERO, UNPACK)
    width: gl.constexpr = codes.shape[1]
    for plane in gl.static_range(128 // width):
        panel = stage * 2 + plane * width // _DEPTH
        x = x_ring.index(panel).slice(plane * width % _DEPTH, width, dim=1)
        main = warpgroup_mma(planes[plane], x.permute((1, 0)), main, is_async=True)
        if TAIL:
            x = t_ring.index(panel).slice(plane * width % _DEPTH, width, dim=1)
            again = gl.convert_layout(planes[plane], _SHORT_LEFT, assert_trivial=True)
            short = warpgroup_mma(again, x.permute((1, 0)), short, is_async=True)
    # The next step overwrites registers that these products read.
    if TAIL:
        main, short = warpgroup_mma_wait(0, deps=[main, short])
    else:
        main = warpgroup_mma_wait(0, deps=[main])
    return main, short


@gluon.jit
def _unpacked(
    words, scales, KIND: gl.constexpr, SCALED: gl.constexpr, ZERO: gl.constexpr,
    UNPACK: gl.constexpr,
):  # fmt: skip
    """Returns four or two planes in bfloat16 [HALF, width], times their groups' scales, if any."""
    scale, zero = scales
    if KIND == _INT4:
        a, b, c, d = nibbles(words)
        factor = scale * 64.0
        planes = (
            _times(less_zero(a, zero, 0, ZERO), factor),
            _times(less_zero(b, zero, 1, ZERO), factor),
            _times(less_zero(c, zero, 2, ZERO), factor),
            _times(less_zero(d, zero, 3, ZERO), factor),
        )
    elif KIND == _MXFP4:
        even, odd = mxfp4_factors(scale)
        planes = e2m1_times(words, even, odd)
    else:
        if KIND == _OTHER:
            planes = UNPACK(words)
        elif KIND == _INT8:
            planes = int8_pair(words)
        else:
            planes = e4m3_pair(words)
        if SCALED:
            planes = (_times(planes[0], scale), _times(planes[1], scale))
    return planes


@gluon.jit
def _times(values, rows):
    factor = each(rows.to(gl.bfloat16), values.shape)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }""",
        "=r,r,r", [values, factor], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
