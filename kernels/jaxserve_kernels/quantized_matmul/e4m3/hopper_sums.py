"""The arithmetic of a warpgroup of `hopper`: products of its rows with the tokens, step by step,
and the correction for integers' zero points."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.quantized_matmul.e4m3.hopper_mxfp4 import looked_up, of_blocks
from jaxserve_kernels.quantized_matmul.e4m3.hopper_operand import (
    e2m1_times,
    half_of_words,
    integer_planes,
    nvfp4_factors,
    of_both,
    of_rows,
    operand,
    scales_of,
)
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, NVFP4

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.jit
def add_integers(
    acc, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free, at, steps,
    part: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc plus the sums of `steps` tiles. Before the products of a group are added, acc is divided
    by the group's scale, so that one accumulator is enough."""
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    PLANES: gl.constexpr = GROUP // 32
    SOME: gl.constexpr = PLANES // 2 if PLANES > 1 else 1
    before = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, mma))
    for _ in range(steps):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        x = x_ring.index(stage)
        a = integer_planes(a_ring.index(stage), part)
        b = integer_planes(b_ring.index(stage), part)
        for group in gl.static_range(128 // GROUP):
            a_scale = scales_of(a_scales, stage, group, part)
            scale = of_rows(a_scale, scales_of(b_scales, stage, group, part), mma)
            scale = gl.where(gl.abs(scale) < 1e-18, 1e-18, scale)  # avoid division by 0
            acc *= (before / scale)[:, None]
            before = scale
            first = operand(
                a[group * PLANES : group * PLANES + SOME],
                b[group * PLANES : group * PLANES + SOME], SOME, left, _INT4,
            )  # fmt: skip
            second = first
            if PLANES > 1:
                second = operand(
                    a[group * PLANES + SOME : (group + 1) * PLANES],
                    b[group * PLANES + SOME : (group + 1) * PLANES], SOME, left, _INT4,
                )  # fmt: skip
            acc = _multiply(first, second, x.slice(group * GROUP, GROUP, dim=1), acc)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    return acc * before[:, None], at


@gluon.jit
def add_floats(
    acc, x_ring, a_ring, b_ring, a_scales, b_scales, ready, free, a_largest, b_largest, at,
    steps, part: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc plus the products of `steps` tiles, without the common factor of each row."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    for _ in range(steps):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        words = a_ring.index(stage), b_ring.index(stage)
        if KIND == _NVFP4:
            first = _nvfp4(words, a_scales, b_scales, stage, 0, part, left)
            second = _nvfp4(words, a_scales, b_scales, stage, 1, part, left)
        else:
            a = _mxfp4(words[0], a_scales, stage, a_largest, part)
            b = _mxfp4(words[1], b_scales, stage, b_largest, part)
            first = of_both(a, b, left)
            second = first
        acc = _multiply(first, second, x_ring.index(stage), acc)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    return acc, at


@gluon.jit
def _nvfp4(
    words, a_scales, b_scales, stage, half: gl.constexpr, part: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The left operand of half of 128 inputs."""
    a_factors = nvfp4_factors(scales_of(a_scales, stage, half, part))
    b_factors = nvfp4_factors(scales_of(b_scales, stage, half, part))
    a = e2m1_times(half_of_words(words[0], part, half), a_factors[0], a_factors[1])
    b = e2m1_times(half_of_words(words[1], part, half), b_factors[0], b_factors[1])
    return operand(a, b, 4, layout, _NVFP4)


@gluon.jit
def _mxfp4(words, scales, stage, largest, part: gl.constexpr):
    exponents = of_blocks(scales.index(stage)).slice(part * 32, 32, dim=0)
    return looked_up(words.slice(part * 32, 32, dim=0), exponents, largest)


@gluon.jit
def _multiply(first, second, x, acc):
    """acc plus the products of `first` and `second` with the halves of x's inputs; or of `first`
    alone with all inputs."""
    inputs: gl.constexpr = first.shape[1]
    acc = warpgroup_mma(first, x.slice(0, inputs, dim=1).permute((1, 0)), acc, is_async=True)
    if inputs < x.shape[1]:
        x = x.slice(inputs, inputs, dim=1)
        acc = warpgroup_mma(second, x.permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def less_zeros(
    acc, sums, scale_ptr, zero_ptr, sum_ptr, at, first, steps, padded: gl.constexpr,
    ZERO: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """acc minus each group's scale * zero times the tokens' sums, as one small product."""
    before: gl.constexpr = acc.type.layout
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    acc = gl.convert_layout(acc, mma, assert_trivial=True)
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    at = gl.convert_layout(at, gl.SliceLayout(1, left))
    for start in gl.static_range(0, GROUPS, 32):
        group = start + gl.arange(0, 32, gl.SliceLayout(0, left))
        known, _ = gl.broadcast((group < steps)[None, :], at[:, None])
        place = at[:, None] + ((first + group) * 64)[None, :]
        scale = gl.load(scale_ptr + place, mask=known, other=0.0)
        zero = 8.0
        if ZERO != _NO_ZERO:
            zero = gl.load(zero_ptr + place, mask=known, other=0).to(gl.float32)
        group = start + gl.arange(0, 32, gl.SliceLayout(1, flat))
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, flat))
        known, _ = gl.broadcast((group < steps)[:, None], token[None, :])
        of_token = gl.load(
            sum_ptr + ((first + group) * padded)[:, None] + token[None, :], mask=known, other=0.0
        )
        gl.barrier()
        sums.store(of_token.to(gl.bfloat16))
        fence_async_shared()
        gl.barrier()
        acc = warpgroup_mma((scale * (-zero)).to(gl.bfloat16), sums, acc)
    return gl.convert_layout(acc, before, assert_trivial=True)
