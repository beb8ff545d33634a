"""4-bit integer weights with a scale and an optional zero point per group of inputs."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.eight_bit import E4M3_MAX
from jaxserve_kernels.weights.format import Kind, Operand, Quantized


class _Arrays(NamedTuple):
    packed: Array  # uint16 [out / 64, in / 128, 64, 32], see layout.pack_nibbles
    scale: Array  # float32 [out / 64, groups, 64]
    zero: Array | None = None
    """Zero points, shaped like scale: int32, or float32 if fractional. None: 8 everywhere."""


class Int4Weight(_Arrays, Quantized):
    """weight[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group], in float32.

    Codes are 0..15; groups of 32, 64 or 128 inputs, or one for all. Leading axes (layers) may
    come before those of the arrays.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return layout.logical_shape(self.packed, bits=4)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-2]

    @property
    def operand(self) -> Operand | None:
        if self.group not in (32, 64, 128):
            return None
        return Operand(
            arrays=(self.packed, self.scale, self.scale if self.zero is None else self.zero),
            kind=Kind.INT4,
            bits=4,
            group=self.group,
            zero=self.zero is not None,
            tokens_in="e4m3",
            sums=True,
        )

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the values of the codes, by definition."""
        codes = layout.unpack_nibbles(self.packed).astype(jnp.float32)
        zero = 8.0 if self.zero is None else self._per_input(self.zero)
        return (codes - zero) * self._per_input(self.scale)

    @property
    def can_be_copied(self) -> bool:
        return True

    def largest(self) -> Array:
        """The largest magnitude that codes could give in each row: float32 [..., out / 64, 1, 64].

        1 where all scales are 0.
        """
        zero = 8.0 if self.zero is None else self.zero.astype(jnp.float32)
        reach = jnp.maximum(jnp.abs(zero), jnp.abs(15.0 - zero))
        return layout.or_one(jnp.max(jnp.abs(self.scale) * reach, axis=-2, keepdims=True))

    def e4m3_scale(self) -> Array:
        return self.largest() / E4M3_MAX

    def e4m3_factors(self, scale: Array) -> Array:
        return 1.0 / scale

    def _per_input(self, tiled: Array) -> Array:
        values = layout.untile_rows(tiled).astype(jnp.float32)
        return jnp.repeat(values, self.group, axis=-1)


def pack_int4(codes: Array, scale: Array, zero: Array | None = None) -> Int4Weight:
    """Makes a weight from codes 0..15 [..., out, in], and scale and zero [..., out, groups]."""
    if zero is not None:
        whole = jnp.issubdtype(zero.dtype, jnp.integer)
        zero = layout.tile_rows(zero.astype(jnp.int32 if whole else jnp.float32))
    return Int4Weight(layout.pack_nibbles(codes), layout.tile_rows(scale.astype(jnp.float32)), zero)


def quantize_int4(weight: Array, group: int = 128) -> Int4Weight:
    """Rounds to nearest, without zero points.

    The value of largest magnitude in a group becomes exactly -8 * scale, so all 16 codes are
    used; the scale takes its sign (llama.cpp's Q4_0 does the same with groups of 32).
    """
    *leading, out, depth = weight.shape
    grouped = weight.astype(jnp.float32).reshape(*leading, out, depth // group, group)
    largest = jnp.argmax(jnp.abs(grouped), axis=-1, keepdims=True)
    scale = jnp.take_along_axis(grouped, largest, axis=-1) / -8.0
    inverse = jnp.where(scale == 0, 0.0, 1.0 / scale)
    codes = jnp.clip(jnp.round(grouped * inverse) + 8.0, 0.0, 15.0)
    return pack_int4(codes.reshape(weight.shape), scale[..., 0])
