"""4-bit floating-point weights: NVFP4 and MXFP4, e2m1 values in blocks that share a scale.

e2m1 has a sign bit, two exponent bits and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives. MXFP4 is the OCP Microscaling Formats specification v1.0; NVFP4 is described in NVIDIA's
"Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.eight_bit import E4M3_MAX
from jaxserve_kernels.weights.format import Kind, Operand, Quantized

E2M1_MAX = 6.0
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32


class _Nvfp4Arrays(NamedTuple):
    packed: Array  # uint16 [out / 64, in / 64, 64, 16], see layout.pack_nibbles
    scale: Array  # uint32 [out / 64, in / 64, 64]: four e4m3 scales from the low byte up
    row_scale: Array  # float32 [out / 64, 1, 64]: a tensor's scale, repeated for its rows


class Nvfp4Weight(_Nvfp4Arrays, Quantized):
    """weight[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * row_scale[n], in float32."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return layout.logical_shape(self.packed, bits=4)

    @property
    def operand(self) -> Operand | None:
        if self.shape[1] % 128:
            return None
        return Operand(
            arrays=(self.packed, self.scale, self.row_scale),
            kind=Kind.NVFP4,
            bits=4,
            group=_NVFP4_BLOCK,
            scale_bytes=1,
            inputs_per_tile=4 * _NVFP4_BLOCK,
            tokens_in="e4m3",
        )

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the values of the codes, by definition."""
        codes = _bytes_of(layout.untile_rows(self.scale))
        scale = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        values = e2m1_values(layout.unpack_nibbles(self.packed))
        scaled = values * jnp.repeat(scale, _NVFP4_BLOCK, axis=-1)
        return scaled * layout.untile_rows(self.row_scale)

    @property
    def can_be_copied(self) -> bool:
        return True

    def e4m3_scale(self) -> Array:
        return 8.0 * self.row_scale  # 6 * 448 / 8 is within e4m3; eighths change no mantissa


class _Mxfp4Arrays(NamedTuple):
    packed: Array  # uint16 [out / 64, in / 128, 64, 32], see layout.pack_blocks
    scale: Array  # uint32 [out / 64, in / 128, 64]: four exponents (E8M0) from the low byte up
    largest: Array  # uint8 [out / 64, 1, 64]: the largest exponent of the blocks in each row


class Mxfp4Weight(_Mxfp4Arrays, Quantized):
    """weight[n, k] = e2m1(code[n, k]) * 2 ** (scale[n, k // 32] - 127), in float32."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return layout.logical_shape(self.packed, bits=4)

    @property
    def operand(self) -> Operand | None:
        if self.shape[1] % 128:
            return None
        return Operand(
            arrays=(self.packed, self.scale, self.largest),
            kind=Kind.MXFP4,
            bits=4,
            group=_MXFP4_BLOCK,
            scale_bytes=1,
            tokens_in="e4m3",
        )

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the values of the codes, by definition. Exponent 255 is NaN."""
        exponent = _bytes_of(layout.untile_rows(self.scale)).astype(jnp.int32)
        power = jnp.ldexp(jnp.float32(1.0), exponent - 127)
        power = jnp.where(exponent == 255, jnp.nan, power)
        values = e2m1_values(layout.unpack_blocks(self.packed))
        return values * jnp.repeat(power, _MXFP4_BLOCK, axis=-1)

    @property
    def can_be_copied(self) -> bool:
        return True

    def e4m3_scale(self) -> Array:
        power = self.largest.astype(jnp.int32) - (127 + 6)  # 6 * 2 ** 6 is within e4m3
        return jnp.ldexp(jnp.float32(1.0), power)

    def e4m3_factors(self, scale: Array) -> Array:
        return self.largest.astype(jnp.int32)


def e2m1_values(codes: Array) -> Array:
    """float32 values of codes 0..15."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = halves.astype(jnp.float32) * 0.5
    return jnp.where(codes >= 8, -magnitude, magnitude)


def e2m1_codes(values: Array) -> Array:
    """uint8 codes of the nearest e2m1 values, ties to even codes. Magnitudes are clipped at 6."""
    magnitude = jnp.abs(values)
    code = sum(
        (magnitude >= edge if index % 2 else magnitude > edge).astype(jnp.uint8)
        for index, edge in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    )
    return jnp.where(jnp.signbit(values), code | 8, code).astype(jnp.uint8)


def pack_nvfp4(codes: Array, scale: Array, row_scale: Array) -> Nvfp4Weight:
    """Makes a weight from codes [..., out, in], float8_e4m3fn scales [..., out, in / 16] and row
    scales [..., out]."""
    words = _words_of(jax.lax.bitcast_convert_type(scale, jnp.uint8))
    rows = layout.tile_rows(row_scale.astype(jnp.float32)[..., None])
    packed = layout.pack_nibbles(codes, depth=4 * _NVFP4_BLOCK)
    return Nvfp4Weight(packed, layout.tile_rows(words), rows)


def pack_mxfp4(codes: Array, exponents: Array) -> Mxfp4Weight:
    """Makes a weight from codes [..., out, in] and uint8 exponents [..., out, in / 32]."""
    largest = jnp.max(exponents, axis=-1, keepdims=True).astype(jnp.uint8)
    words = layout.tile_rows(_words_of(exponents))
    return Mxfp4Weight(layout.pack_blocks(codes), words, layout.tile_rows(largest))


def quantize_nvfp4(weight: Array) -> Nvfp4Weight:
    """Rounds to nearest. The tensor's scale makes the largest block scale 448."""
    *leading, out, depth = weight.shape
    blocks = weight.astype(jnp.float32).reshape(*leading, out, depth // _NVFP4_BLOCK, _NVFP4_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    tensor = jnp.max(largest, axis=(-1, -2), keepdims=True) / (E2M1_MAX * E4M3_MAX)
    tensor = jnp.where(tensor == 0, 1.0, tensor)
    scale = jnp.minimum(largest / (E2M1_MAX * tensor), E4M3_MAX).astype(jnp.float8_e4m3fn)
    step = scale.astype(jnp.float32) * tensor
    codes = e2m1_codes(blocks * jnp.where(step == 0, 0.0, 1.0 / step)[..., None])
    row_scale = jnp.broadcast_to(tensor[..., 0], (*leading, out))
    return pack_nvfp4(codes.reshape(weight.shape), scale, row_scale)


def quantize_mxfp4(weight: Array) -> Mxfp4Weight:
    """Rounds to nearest. A block's exponent is that of its largest value minus 2 (OCP MX, 6.3)."""
    *leading, out, depth = weight.shape
    blocks = weight.astype(jnp.float32).reshape(*leading, out, depth // _MXFP4_BLOCK, _MXFP4_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23  # the exponent, biased by 127
    exponent = jnp.clip(bits - 2, 1, 254)
    step = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    codes = e2m1_codes(blocks / step[..., None])
    return pack_mxfp4(codes.reshape(weight.shape), exponent.astype(jnp.uint8))


def _words_of(scales: Array) -> Array:
    """Packs uint8 [..., n] into uint32 [..., n / 4], the first in the low byte."""
    four = scales.astype(jnp.uint32).reshape(*scales.shape[:-1], -1, 4)
    return four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24


def _bytes_of(words: Array) -> Array:
    """The inverse of `_words_of`."""
    four = jnp.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], axis=-1)
    return four.astype(jnp.uint8).reshape(*words.shape[:-1], -1)
