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
    each,
    four_apart,
    int8_pair,
    less_zero,
    mxfp4_planes,
    nibbles,
    nibbles_and_biased,
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
def _planes(words, scales, KIND: gl.constexpr, BIASED: gl.constexpr):
    """Converts words of codes to planes in bfloat16. 4-bit floats are multiplied by the scales of
    their blocks: `scales` has one word per row. 4-bit integers are the input of `less_zero`.
    BIASED: those of even planes are 2 + nibble / 64."""
    if BIASED:
        planes = nibbles_and_biased(words)
    elif KIND == _INT4:
        planes = nibbles(words)
    elif KIND == _NVFP4:  # 2^-8 times the weight
        even, odd = nvfp4_factors(scales)
        planes = e2m1_times(words, each(even, words.shape), each(odd, words.shape))
    elif KIND == _MXFP4:  # relative to MXFP4_POWER
        planes = _mxfp4_planes(words, scales)
    elif KIND == _INT8:
        planes = int8_pair(words)
    else:
        gl.static_assert(KIND == _FP8)
        planes = e4m3_pair(words)
    return planes


@gluon.jit
def _mxfp4_planes(words, scales):
    left: gl.constexpr = words.type.layout
    parts = four_apart(words)
    of_rows: gl.constexpr = gl.SliceLayout(1, parts[0].type.layout)
    scales = gl.convert_layout(scales, of_rows, assert_trivial=True)
    a, b, c, d = mxfp4_planes(parts, scales)
    return (
        gl.convert_layout(a, left, assert_trivial=True),
        gl.convert_layout(b, left, assert_trivial=True),
        gl.convert_layout(c, left, assert_trivial=True),
        gl.convert_layout(d, left, assert_trivial=True),
    )


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
def less_bias(ROWS: gl.constexpr, mma: gl.constexpr):
    """-(2 + 8 / 64), with which tokens are multiplied to take the bias from sums [ROWS, tokens]. 64
    rows of four warps are enough, since all are alike."""
    rows: gl.constexpr = 64 if ROWS > 64 else ROWS
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row = gl.arange(0, rows, gl.SliceLayout(1, left))[:, None]
    index = row * 32 + gl.arange(0, 32, gl.SliceLayout(0, left))[None, :]
    # The grid has no third dimension, but ptxas does not know that these are all alike: otherwise
    # it copies them to the registers of each product.
    bits = 0xC008 + gl.program_id(2) * index
    return bits.to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _bias_of(bias, tokens, first: gl.constexpr, last: gl.constexpr, part, right: gl.constexpr):
    """What the biases of even planes from `first` to before `last` add to sums like `part`, taken
    from 0: the tensor cores sum the tokens."""
    mma: gl.constexpr = part.type.layout
    ROWS: gl.constexpr = part.shape[0]
    TOKENS: gl.constexpr = part.shape[1]
    rows: gl.constexpr = bias.shape[0]
    less = gl.zeros([rows, TOKENS], gl.float32, mma)
    for plane in gl.static_range(first, last, 2):
        x = tokens.slice(plane * 32, 32, dim=1).permute((1, 0)).load(right)
        less = mma_v2(bias, x, less)
    if rows < ROWS:
        both = gl.join(less, less).permute((2, 0, 1)).reshape([ROWS, TOKENS])
        less = gl.convert_layout(both, mma, assert_trivial=True)
    return less


@gluon.jit
def add_k_steps(
    acc, words, scales, zeros, inputs,
    COUNT: gl.constexpr, groups: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    KIND: gl.constexpr, ZERO: gl.constexpr, bias=0, BIASED: gl.constexpr = False,
):  # fmt: skip
    """Adds the products of a k-step's first COUNT tiles to acc. A warpgroup waits for a product
    after it has issued the next one. groups: scales per row and tile; 0: one scale per row.

    BIASED: half of the 4-bit integers without zero points are multiplied with a bias, which takes
    fewer instructions. Larger sums then cancel, in float32. `bias` is from `less_bias`.
    """
    mma: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    halves: gl.constexpr = 2 if KIND == _NVFP4 else 1  # a tile of codes may be 64 inputs
    planes: gl.constexpr = 2 if KIND < _INT4 else 4
    depth: gl.constexpr = 128 // (halves * planes)
    scaled: gl.constexpr = groups > 0 and KIND <= _INT4
    # Number of planes that are summed before the sum is scaled, or waited for.
    shared: gl.constexpr = planes // groups if scaled else halves * planes
    # With zero points, biases would differ from row to row.
    biased: gl.constexpr = BIASED and KIND == _INT4 and ZERO == _NO_ZERO
    gl.static_assert(not biased or TOKENS <= MOST_BY_A_WARP)
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
            values = _planes(codes, blocks, KIND, biased)
            for plane in gl.static_range(half * planes, half * planes + planes):
                value = values[plane % planes]
                if biased and plane % shared == 0 and (plane % 2 == 0 or shared > 1):
                    part = _bias_of(bias, tokens, plane, plane + shared, part, right)
                if KIND == _INT4 and not (biased and plane % 2 == 0):
                    value = _plane_less_zero(
                        value, zeros, tile * groups + plane // shared, plane, ROWS, ZERO
                    )
                x = tokens.slice(plane * depth, depth, dim=1).permute((1, 0))
                if TOKENS > MOST_BY_A_WARP and scaled:
                    part = warpgroup_mma(value, x, part, use_acc=plane % shared > 0, is_async=True)
                elif TOKENS > MOST_BY_A_WARP:
                    acc = warpgroup_mma(value, x, acc, is_async=True)
                elif scaled:
                    part = mma_v2(value, x.load(right), part)
                else:
                    acc = mma_v2(value, x.load(right), acc)
                if plane % shared == shared - 1:
                    scale = scale_before
                    if scaled:
                        scale = scales.slice((tile * groups + plane // shared) * ROWS, ROWS)
                        scale = scale.load(gl.SliceLayout(1, mma))
                    if TOKENS > MOST_BY_A_WARP and scaled:
                        if tile + plane // shared > 0:
                            before = warpgroup_mma_wait(shared, deps=[before])
                            acc += before * scale_before[:, None]
                        before = part
                        scale_before = scale
                    elif TOKENS > MOST_BY_A_WARP:
                        acc = warpgroup_mma_wait(shared, deps=[acc])
                    elif scaled:
                        acc += part * scale[:, None]
                    part = nothing
    if TOKENS > MOST_BY_A_WARP and scaled:
        before = warpgroup_mma_wait(0, deps=[before])
        acc += before * scale_before[:, None]
    elif TOKENS > MOST_BY_A_WARP:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc
