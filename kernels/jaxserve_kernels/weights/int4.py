"""4-bit integer weights with a scale, and perhaps a zero point, per group of inputs."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.format import Kind, Quantized


@Quantized.register
class Int4Weight(NamedTuple):
    """weight[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group], in float32.

    Codes are 0..15; groups of 32, 64 or 128 inputs, or one for all. Leading axes (layers) may
    come before those below.
    """

    packed: Array  # uint16 [out / 64, in / 128, 64, 32], see layout.pack_nibbles
    scale: Array  # float32 [out / 64, groups, 64]
    zero: Array | None = None
    """Like scale; int32 for whole zero points, float32 for any. None: 8 everywhere."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return layout.logical_shape(self.packed, bits=4)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-2]

    @property
    def has_kernel(self) -> bool:
        return self.group in (32, 64, 128)

    @property
    def row_bytes(self) -> int:
        return 64 + 4 * (128 // self.group) * (1 if self.zero is None else 2)

    @property
    def kernel_arrays(self) -> tuple[Array, Array, Array]:
        return self.packed, self.scale, self.scale if self.zero is None else self.zero

    @property
    def kernel_constants(self) -> dict[str, int]:
        zero = int(self.zero is not None)
        return {"KIND": Kind.INT4.value, "GROUP": self.group, "ZERO": zero}

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the definition of what the codes mean."""
        codes = layout.unpack_nibbles(self.packed).astype(jnp.float32)
        zero = 8.0 if self.zero is None else self._per_input(self.zero)
        return (codes - zero) * self._per_input(self.scale)

    def largest(self) -> Array:
        """The largest magnitude that codes could give in each row: float32 [..., out / 64, 1, 64].

        1 where all scales are 0.
        """
        zero = 8.0 if self.zero is None else self.zero.astype(jnp.float32)
        reach = jnp.maximum(jnp.abs(zero), jnp.abs(15.0 - zero))
        return layout.or_one(jnp.max(jnp.abs(self.scale) * reach, axis=-2, keepdims=True))

    def _per_input(self, tiled: Array) -> Array:
        values = layout.untile_rows(tiled).astype(jnp.float32)
        return jnp.repeat(values, self.group, axis=-1)


def pack_int4(codes: Array, scale: Array, zero: Array | None = None) -> Int4Weight:
    """From codes 0..15 [..., out, in], and scale and zero [..., out, groups]."""
    if zero is not None:
        whole = jnp.issubdtype(zero.dtype, jnp.integer)
        zero = layout.tile_rows(zero.astype(jnp.int32 if whole else jnp.float32))
    return Int4Weight(layout.pack_nibbles(codes), layout.tile_rows(scale.astype(jnp.float32)), zero)


def quantize_int4(weight: Array, group: int = 128) -> Int4Weight:
    """Round to nearest, without zero points.

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
