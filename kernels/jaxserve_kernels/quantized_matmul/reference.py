"""The definition of products with quantised weights: dequantise, round to x's dtype, multiply."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.dense_matmul import reference as dense
from jaxserve_kernels.weights import CopiedWeight, Fp8Weight, Int8Weight, QuantizedWeight, layout


def linear(x: Array, weight: QuantizedWeight, dtype: DTypeLike) -> Array:
    """x [tokens, in] times weight [out, in] transposed: [1, tokens, out] in `dtype`."""
    return dense.linear(x, weight.dequantize().astype(x.dtype), dtype)


def gated_linear(x: Array, weight: QuantizedWeight) -> Array:
    """See `dense_matmul.reference.gated_linear`."""
    return dense.gated_linear(x, weight.dequantize().astype(x.dtype))


def take_quantized_rows(weight: QuantizedWeight | CopiedWeight, ids: Array) -> Array:
    """float32 rows `ids` [n] of a weight [out, in] with 8-bit codes and a scale per row."""
    if not isinstance(weight, Int8Weight | Fp8Weight) or weight.scale.shape[-2] != 1:
        raise TypeError(f"rows are taken from 8-bit weights with a scale per row, not {weight}")
    tile, row = ids // layout.TILE_OUT, ids % layout.TILE_OUT
    codes = layout.take_byte_rows(weight.packed, ids)
    return weight.values(codes) * weight.scale[tile, 0, row][:, None]
