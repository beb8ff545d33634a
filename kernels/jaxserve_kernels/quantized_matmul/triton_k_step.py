"""A k-step of the streaming products: tiles of codes times tokens, both in shared memory.

Codes are converted to bfloat16 in registers, from which the tensor cores read them. One product
takes a plane of inputs: 32 for 4-bit codes, 64 for bytes, and 16 for NVFP4, which has two tiles of
64 inputs in place of one of 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from jaxserve_kernels.quantized_matmul.triton_arguments import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    NO_ZERO,
    NVFP4,
)
from jaxserve_kernels.quantized_matmul.triton_unpack import (
    e2m1_times,
    e4m3_pair,
    int8_pair,
    less_zero,
    mxfp4_factors,
    nibbles,
    nvfp4_factors,
)

_INT8 = gl.constexpr(INT8.value)
_FP8 = gl.constexpr(FP8.value)
_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_MXFP4 = gl.constexpr(MXFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

MOST_BY_A_WARP = gl.constexpr(16)
"""Up to this many tokens each warp multiplies its own rows, without waiting for other warps. With
more tokens a warpgroup multiplies together, so that it reads the tokens from shared memory once."""


@gluon.jit
def _planes(words, scales, KIND: gl.constexpr):
    """Converts words of codes to planes in bfloat16. 4-bit floats are multiplied by the scales of
    their blocks: `scales` has one word per row. 4-bit integers are the input of `less_zero`."""
    if KIND == _INT4:
        planes = nibbles(words)
    elif KIND == _NVFP4:  # 2^-8 times the weight
        a, b, c, d = nvfp4_factors(scales)
        planes = e2m1_times(words, a, b, c, d)
    elif KIND == _MXFP4:  # relative to MXFP4_POWER
        a, b, c, d = mxfp4_factors(scales)
        planes = e2m1_times(words, a, b, c, d)
    elif KIND == _INT8:
        planes = int8_pair(words)
    else:
        gl.static_assert(KIND == _FP8)
        planes = e4m3_pair(words)
    return planes


@gluon.jit
def _plane_less_zero(
    values, zeros, place: gl.constexpr, plane: gl.constexpr, ROWS: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """Applies `less_zero` to a plane of 4-bit integers; zero points are at index `place`."""
    if ZERO == _NO_ZERO:
        values = less_zero(values, 0, plane, ZERO)
    else:
        zero = zeros.slice(place * ROWS, ROWS).load(gl.SliceLayout(1, values.type.layout))
        values = less_zero(values, zero, plane, ZERO)
    return values


@gluon.jit
def _add(acc, part, scale, SCALED: gl.constexpr):
    if SCALED:
        acc += part * scale[:, None]
    else:
        acc += part
    return acc


@gluon.jit
def add_k_steps(
    acc, words, scales, zeros, inputs,
    COUNT: gl.constexpr, groups: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    KIND: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Adds the products of a k-step's first COUNT tiles to acc. A warpgroup waits for a product
    after it has issued the next one. groups: scales per row and tile; 0: one scale per row."""
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    halves: gl.constexpr = 2 if KIND == _NVFP4 else 1  # a tile of codes may be 64 inputs
    planes: gl.constexpr = 2 if KIND < _INT4 else 4
    depth: gl.constexpr = 128 // (halves * planes)
    scaled: gl.constexpr = groups > 0 and KIND <= _INT4
    # Number of planes that are summed before the sum is scaled or added.
    shared: gl.constexpr = planes // groups if scaled else halves * planes
    nothing = gl.zeros_like(acc)
    before = nothing
    scale_before = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, mma))
    for tile in gl.static_range(COUNT):
        tokens = inputs.slice(tile * TOKENS, TOKENS)
        part = nothing
        for half in gl.static_range(halves):
            codes = words.slice((tile * halves + half) * ROWS, ROWS).load(left)
            blocks = 0
            if KIND > _INT4:
                blocks = scales.slice((tile * halves + half) * ROWS, ROWS)
                blocks = blocks.load(gl.SliceLayout(1, left))
            values = _planes(codes, blocks, KIND)
            for plane in gl.static_range(half * planes, half * planes + planes):
                value = values[plane % planes]
                if KIND == _INT4:
                    value = _plane_less_zero(
                        value, zeros, tile * groups + plane // shared, plane, ROWS, ZERO
                    )
                x = tokens.slice(plane * depth, depth, dim=1).permute((1, 0))
                if TOKENS > MOST_BY_A_WARP:
                    part = warpgroup_mma(value, x, part, use_acc=plane % shared > 0, is_async=True)
                elif scaled:
                    part = mma_v2(value, x.load(right), part)
                else:
                    acc = mma_v2(value, x.load(right), acc)
                if plane % shared == shared - 1:
                    scale = scale_before
                    if scaled:
                        scale = scales.slice((tile * groups + plane // shared) * ROWS, ROWS)
                        scale = scale.load(gl.SliceLayout(1, mma))
                    if TOKENS > MOST_BY_A_WARP:
                        if tile + plane // shared > 0:
                            before = warpgroup_mma_wait(shared, deps=[before])
                            acc = _add(acc, before, scale_before, scaled)
                        before = part
                        scale_before = scale
                    elif scaled:
                        acc = _add(acc, part, scale, scaled)
                    part = nothing
    if TOKENS > MOST_BY_A_WARP:
        before = warpgroup_mma_wait(0, deps=[before])
        acc = _add(acc, before, scale_before, scaled)
    return acc
