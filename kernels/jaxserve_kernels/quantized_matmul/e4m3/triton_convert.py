"""Converts 4-bit weights to e4m3 on a GPU, for products of many tokens. The result is that of
`weights.e4m3_copy`, but made again for each product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, NVFP4, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_unpack import e4m3_byte, power
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Fp8Weight, Quantized


@triton.jit
def _e2m1(code):
    """The low four bits as an e2m1 number, in float32: moves the bits, then corrects the
    exponent."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126


@triton.jit
def _words_of(low, high):
    """Packs the e4m3 codes of float32 values into words."""
    low = low.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
    high = high.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
    return low | (high << 8)


@triton.jit
def _int4_plane(
    words, scale_ptr, zero_ptr, factor,
    GROUP: tl.constexpr, ZERO: tl.constexpr, plane: tl.constexpr,
):  # fmt: skip
    """A plane's weights times the factors of their rows."""
    group: tl.constexpr = plane * 32 // GROUP
    scale = tl.load(scale_ptr + group * 64) * factor
    zero = 8.0
    if ZERO != NO_ZERO:
        zero = tl.load(zero_ptr + group * 64).to(tl.float32)[:, None]
    return (((words >> (4 * plane)) & 15).to(tl.float32) - zero) * scale[:, None]


@triton.jit
def _nvfp4_plane(words, scales, plane: tl.constexpr):
    scale = e4m3_byte(scales, plane) * 0.125
    return _e2m1(words.to(tl.int32) >> (4 * plane)) * scale[:, None]


@triton.jit
def _mxfp4_plane(words, factors, plane: tl.constexpr):
    return _e2m1(words.to(tl.int32) >> (4 * plane)) * factors


@triton.jit
def _mxfp4_factors(scales, largest, block):
    """Powers of two of a row's blocks. `largest`: each row's largest exponent. It is mapped to 6,
    so magnitudes are at most 6 * 2 ** 6."""
    exponent = (scales[:, None] >> (8 * block)) & 0xFF
    return power(tl.maximum(exponent - largest[:, None] + (127 + 6), 0))


@triton.jit
def _to_e4m3(
    packed_ptr, scale_ptr, zero_ptr, factor_ptr, out_ptr,
    tiles: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Converts one tile of 64 rows by 128 inputs from packed nibbles to packed bytes."""
    tile = tl.program_id(1)
    at = (tile.to(tl.int64) * tiles + tl.program_id(0)) * 64
    row = tl.arange(0, 64)
    factor = tl.load(factor_ptr + tile * 64 + row)
    out = out_ptr + (at + row)[:, None] * 64
    if KIND == NVFP4:  # two tiles of 64 inputs: the low and the high bytes
        lane = tl.arange(0, 16)[None, :]
        low_words = tl.load(packed_ptr + (2 * at + row)[:, None] * 16 + lane)
        high_words = tl.load(packed_ptr + (2 * at + 64 + row)[:, None] * 16 + lane)
        low_scales = tl.load(scale_ptr + 2 * at + row)
        high_scales = tl.load(scale_ptr + 2 * at + 64 + row)
        for plane in tl.static_range(4):
            low = _nvfp4_plane(low_words, low_scales, plane)
            high = _nvfp4_plane(high_words, high_scales, plane)
            tl.store(out + 16 * plane + lane, _words_of(low, high))
    elif KIND == INT4:
        lane = tl.arange(0, 32)[None, :]
        words = tl.load(packed_ptr + (at + row)[:, None] * 32 + lane)
        scale = scale_ptr + at * (128 // GROUP) + row
        zero = zero_ptr + at * (128 // GROUP) + row
        for plane in tl.static_range(2):
            low = _int4_plane(words, scale, zero, factor, GROUP, ZERO, plane)
            high = _int4_plane(words, scale, zero, factor, GROUP, ZERO, plane + 2)
            tl.store(out + 32 * plane + lane, _words_of(low, high))
    else:  # words of two blocks are the low bytes, those of the others the high bytes
        lane = tl.arange(0, 16)[None, :]
        words = packed_ptr + (at + row)[:, None] * 32 + lane
        low_words, high_words = tl.load(words), tl.load(words + 16)
        scales = tl.load(scale_ptr + at + row).to(tl.int32)
        low_factors = _mxfp4_factors(scales, factor, lane // 8)
        high_factors = _mxfp4_factors(scales, factor, lane // 8 + 2)
        for plane in tl.static_range(4):
            low = _mxfp4_plane(low_words, low_factors, plane)
            high = _mxfp4_plane(high_words, high_factors, plane)
            tl.store(out + lane // 8 * 32 + 8 * plane + lane % 8, _words_of(low, high))


def to_fp8(weight: Quantized, *, target: Target) -> Fp8Weight:
    """Converts the weight to e4m3, with scales chosen to use e4m3's range."""
    out, k = weight.shape
    scale = weight.e4m3_scale()
    packed = triton_call(
        *arrays(weight), weight.e4m3_factors(scale),
        kernel=_to_e4m3,
        name="weight_to_e4m3",
        target=target,
        out_type=jax.ShapeDtypeStruct((out // 64, k // 128, 64, 64), jnp.uint16),
        grid=(k // 128, out // 64),
        num_warps=4,
        tiles=k // 128, **kind(weight),
    )  # fmt: skip
    return Fp8Weight(packed, scale)
