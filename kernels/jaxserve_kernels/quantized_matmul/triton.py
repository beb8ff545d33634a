"""Multiplies tokens with quantised weights that are converted to bfloat16 in registers.

The weight is the left operand. Its codes go from memory to shared memory to registers. There, a few
bitwise instructions convert two codes at once, in the order that the tensor cores need, so no value
passes through shared memory twice. Several programs can split the inputs of a tile of rows. The
kernel that reads the output adds their float32 partial sums.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton_arguments import (
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    OTHER,
    arrays,
    kind,
)
from jaxserve_kernels.quantized_matmul.triton_planes import of_planes
from jaxserve_kernels.quantized_matmul.triton_unpack import (
    MXFP4_POWER,
    e2m1_times,
    e4m3_pair,
    each,
    four_side_by_side,
    int8_pair,
    less_zero,
    nibbles,
    nvfp4_factors,
    side_by_side,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Quantized


@triton.jit
def _int4_tile(
    acc, words, x, present, scale_ptr, zero_ptr, GROUP: tl.constexpr, ZERO: tl.constexpr
):
    """x, scale_ptr and zero_ptr are at the tile's first group of inputs."""
    a, b, c, d = nibbles(words)
    if GROUP == 128:
        zero = tl.load(zero_ptr)
        four = four_side_by_side(
            less_zero(a, zero, 0, ZERO), less_zero(b, zero, 1, ZERO),
            less_zero(c, zero, 2, ZERO), less_zero(d, zero, 3, ZERO),
        )  # fmt: skip
        acc = _int4_group(acc, four, x, present, scale_ptr)
    elif GROUP == 64:
        zero = tl.load(zero_ptr)
        two = side_by_side(less_zero(a, zero, 0, ZERO), less_zero(b, zero, 1, ZERO))
        acc = _int4_group(acc, two, x, present, scale_ptr)
        zero = tl.load(zero_ptr + 64)
        two = side_by_side(less_zero(c, zero, 2, ZERO), less_zero(d, zero, 3, ZERO))
        acc = _int4_group(acc, two, x + 64, present, scale_ptr + 64)
    else:
        a = less_zero(a, tl.load(zero_ptr), 0, ZERO)
        acc = _int4_group(acc, a, x, present, scale_ptr)
        b = less_zero(b, tl.load(zero_ptr + 64), 1, ZERO)
        acc = _int4_group(acc, b, x + 32, present, scale_ptr + 64)
        c = less_zero(c, tl.load(zero_ptr + 128), 2, ZERO)
        acc = _int4_group(acc, c, x + 64, present, scale_ptr + 128)
        d = less_zero(d, tl.load(zero_ptr + 192), 3, ZERO)
        acc = _int4_group(acc, d, x + 96, present, scale_ptr + 192)
    return acc


@triton.jit
def _int4_group(acc, values, x, present, scale_ptr):
    part = tl.dot(values, tl.load(x, mask=present, other=0.0))
    return acc + part * tl.load(scale_ptr)[:, None]


@triton.jit
def _nvfp4_tile(acc, words, inputs, scale_ptr, row_scale):
    """Adds a tile of NVFP4 to acc. A plane is a block.

    A code times its block's scale is exact in bfloat16: 2 and 4 significant bits. The product is
    2^-8 times the weight; row_scale contains the factor 2^8.
    """
    even, odd = nvfp4_factors(tl.load(scale_ptr))
    a, b, c, d = e2m1_times(words, each(even, words.shape), each(odd, words.shape))
    return acc + tl.dot(four_side_by_side(a, b, c, d), inputs) * row_scale[:, None]


@triton.jit
def _mxfp4_tile(acc, words, inputs, scale_ptr):
    """Adds a tile of MXFP4 to acc. Eight words are a block."""
    factors = _mxfp4_factors(scale_ptr, words.shape)
    a, b, c, d = e2m1_times(words, factors, factors)
    return acc + tl.dot(four_side_by_side(a, b, c, d), inputs) * MXFP4_POWER


@triton.jit
def _mxfp4_factors(scale_ptr, shape: tl.constexpr):
    """A factor for each word, in both halves: see `triton_unpack.mxfp4_factors`. Words are not
    split as in `mxfp4_planes`: Triton 3.6 moves them through shared memory, except on Hopper."""
    bytes_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
    exponents = tl.load(bytes_ptr[:, None] + tl.arange(0, 4)[None, :])
    factors = exponents.to(tl.int32) * 0x00800080 + 0x1F001F00
    return tl.reshape(tl.broadcast_to(factors[:, :, None], (shape[0], 4, 8)), shape)


@triton.jit
def _bytes_tile(acc, words, inputs, scale, KIND: tl.constexpr, UNPACK: tl.constexpr):
    if KIND == OTHER:
        low, high = UNPACK(words)
    elif KIND == INT8:
        low, high = int8_pair(words)
    else:
        low, high = e4m3_pair(words)
    return acc + tl.dot(side_by_side(low, high), inputs) * scale[:, None]


@triton.jit
def accumulate(
    x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, first,
    tokens, steps: tl.constexpr, k: tl.constexpr, columns: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Returns weight rows `row` times tokens `token`, over `steps` tiles of inputs from `first`.

    Tokens have `columns` inputs. The weight's other k - columns inputs count as 0; if there are
    any, a scale must cover at least one tile.

    second_ptr: zero points of INT4, or scales per row of NVFP4. GROUP: inputs per float32 scale;
    k if a row has one scale.

    The sums of each tile are scaled and then added to `acc`. Products that accumulate directly in
    `acc` would wait for each other, because their left operand comes from registers.
    """
    depth: tl.constexpr = 64 if KIND == NVFP4 else 128
    width: tl.constexpr = depth // 4 if KIND >= INT4 else depth // 2
    tiles: tl.constexpr = k // depth
    groups: tl.constexpr = depth // GROUP if KIND <= INT4 else 1
    tile = (row // 64).to(tl.int64)
    inner = row % 64
    words = packed_ptr + (tile * tiles + first) * (64 * width) + inner * width
    words = words[:, None] + tl.arange(0, width)[None, :]
    span: tl.constexpr = GROUP if KIND == INT4 else depth  # inputs of one product
    depths = first * depth + of_planes(tl.arange(0, span), KIND)[:, None]
    x = x_ptr + token.to(tl.int64)[None, :] * columns + depths
    present = token[None, :] < tokens  # the others are not read
    at = (tile * tiles + first) * (64 * groups) + inner
    scale_at = scale_ptr + at
    zero_at = second_ptr + at
    if KIND == NVFP4:
        row_scale = tl.load(second_ptr + row) * 256.0
    elif KIND < INT4 and groups == 0:
        row_scale = tl.load(scale_ptr + row)
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for _ in tl.range(0, steps // UNROLL, num_stages=STAGES):
        for _ in tl.static_range(UNROLL):
            codes = tl.load(words)
            there = present
            if columns < k:
                there = present & (depths < columns)
                depths += depth
            if KIND == INT4:
                acc = _int4_tile(acc, codes, x, there, scale_at, zero_at, GROUP, ZERO)
            else:
                inputs = tl.load(x, mask=there, other=0.0)
                if KIND == NVFP4:
                    acc = _nvfp4_tile(acc, codes, inputs, scale_at, row_scale)
                elif KIND == MXFP4:
                    acc = _mxfp4_tile(acc, codes, inputs, scale_at)
                elif groups == 0:
                    acc = _bytes_tile(acc, codes, inputs, row_scale, KIND, UNPACK)
                else:
                    acc = _bytes_tile(acc, codes, inputs, tl.load(scale_at), KIND, UNPACK)
            words += 64 * width
            x += depth
            scale_at += 64 * groups
            zero_at += 64 * groups
    if KIND == INT4:
        acc *= 64.0  # less_zero
    return acc


@triton.jit
def _linear(
    x_ptr, packed_ptr, scale_ptr, second_ptr, tokens, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, UNPACK: tl.constexpr = None,
):  # fmt: skip
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // (64 if KIND == NVFP4 else 128) // SPLITS
    acc = accumulate(
        x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, split * steps,
        tokens, steps, k, k, KIND, GROUP, ZERO, UNROLL, STAGES, UNPACK,
    )  # fmt: skip
    out = out_ptr + (split * tokens + token[None, :]).to(tl.int64) * n + row[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=token[None, :] < tokens)


@triton.jit
def _gated(
    x_ptr, packed_ptr, scale_ptr, second_ptr, tokens, out_ptr,
    n: tl.constexpr, k: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    UNPACK: tl.constexpr = None,
):  # fmt: skip
    """Gated product. A tile is ROWS / 2 rows of gate and the same rows of up."""
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * half + lane % half + (lane // half) * n
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    steps: tl.constexpr = k // (64 if KIND == NVFP4 else 128)
    acc = accumulate(
        x_ptr, packed_ptr, scale_ptr, second_ptr, row, token, 0,
        tokens, steps, k, k, KIND, GROUP, ZERO, UNROLL, STAGES, UNPACK,
    )  # fmt: skip
    out_row = tl.program_id(0) * half + tl.arange(0, half)
    store_gated(acc, out_ptr, out_row, token, tokens, n, half, TOKENS, GATED)


@triton.jit
def store_gated(
    acc, out_ptr, row, token,
    tokens, n: tl.constexpr, half: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Returns activation(gate) * up; gate is the first half of acc's rows, up the second."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, TOKENS)), (1, 2, 0)))
    values = gated(gate, up, out_ptr.dtype.element_ty, GATED)
    out = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(out, values, mask=token[None, :] < tokens)


def launch(
    x: Array,
    weight: Quantized,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    constants = {"GATED": gating(activation)} if gated else {"SPLITS": config.splits}
    return triton_call(
        x, *arrays(weight), tokens,
        kernel=_gated if gated else _linear,
        name=f"{'gated_' if gated else ''}linear_{type(weight).__name__}",
        target=target,
        out_type=out_type,
        grid=(weight.shape[0] // config.rows, config.splits, triton.cdiv(tokens, config.tokens)),
        num_warps=config.num_warps,
        n=out_type.shape[-1], k=k, **kind(weight),
        TOKENS=config.tokens, ROWS=config.rows, **constants,
        UNROLL=config.unroll, STAGES=config.num_stages,
    )  # fmt: skip
