"""A toy format of weights: 6-bit integers with a scale per row. All that a new format takes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve_kernels.weights import Operand, Quantized, layout


@triton.jit
def unpack(words):
    """Codes 0 to 63, less 32, of the low and of the high bytes."""
    low = (words & 63).to(tl.float32) - 32.0
    high = ((words >> 8) & 63).to(tl.float32) - 32.0
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


class _Arrays(NamedTuple):
    packed: jax.Array  # uint16 [out / 64, in / 128, 64, 64], see layout.pack_bytes
    scale: jax.Array  # float32 [out / 64, 1, 64]


class Int6Weight(_Arrays, Quantized):
    """weight[n, k] = (code[n, k] - 32) * scale[n], in float32; codes are 0..63."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return layout.logical_shape(self.packed, bits=8)

    def dequantize(self) -> jax.Array:
        codes = layout.unpack_bytes(self.packed).astype(jnp.float32)
        return (codes - 32.0) * layout.untile_rows(self.scale)

    @property
    def operand(self) -> Operand:
        arrays = (self.packed, self.scale, self.scale)
        return Operand(arrays=arrays, bits=8, group=self.shape[1], unpack=unpack)


def quantize_int6(weight: jax.Array) -> Int6Weight:
    scale = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / 31.0
    codes = jnp.round(weight / scale) + 32.0
    return Int6Weight(layout.pack_bytes(codes.astype(jnp.uint8)), layout.tile_rows(scale))
