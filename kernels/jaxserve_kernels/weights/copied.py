"""4-bit weights with a copy in e4m3 beside them: codes for few tokens, the copy for many."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.eight_bit import E4M3_MAX, Fp8Weight, pack_fp8
from jaxserve_kernels.weights.fp4 import Mxfp4Weight, Nvfp4Weight
from jaxserve_kernels.weights.int4 import Int4Weight
from jaxserve_kernels.weights.ordered import OrderedInt4Weight

type FourBitWeight = Int4Weight | Nvfp4Weight | Mxfp4Weight | OrderedInt4Weight

FOUR_BIT = (Int4Weight, Nvfp4Weight, Mxfp4Weight, OrderedInt4Weight)


class CopiedWeight(NamedTuple):
    """A weight is what its codes mean; the copy is near it, `e4m3_copy` says how near.

    Products of few tokens read the codes, which are half the bytes, those of many the copy, which
    nothing has to be made of: `matmul.as_read` decides.
    """

    codes: FourBitWeight
    copy: Fp8Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return self.codes.shape


def e4m3_copy(weight: FourBitWeight) -> Fp8Weight:
    """The weight in e4m3, with the scales of `e4m3_scale`; inputs lie in the model's order.

    Integers and their scales are rounded to e4m3's four significant bits. The values of MXFP4 fit
    exactly, because its scales are powers of two: all within 2 ** 14 of their row's largest. So do
    those of NVFP4 that are powers of two times their block's scale; the others (1.5, 3 and 6) have
    six significant bits and are rounded. Layers are made one after the other, so that values in
    float32 are there of one only.
    """
    if weight.packed.ndim > 4:
        return jax.lax.map(e4m3_copy, weight)
    stored = weight.stored if isinstance(weight, OrderedInt4Weight) else weight
    scale = layout.untile_rows(e4m3_scale(stored))
    values = weight.dequantize() * jnp.where(scale == 0, 0.0, 1.0 / scale)
    values = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return pack_fp8(values, scale)


def e4m3_scale(weight: Int4Weight | Nvfp4Weight | Mxfp4Weight) -> Array:
    """A scale per row, with which the weight fits e4m3: float32 [..., out / 64, 1, 64]."""
    match weight:
        case Int4Weight():
            return weight.largest() / E4M3_MAX
        case Nvfp4Weight():  # 6 * 448 / 8 is within e4m3, and eighths change no mantissa
            return 8.0 * weight.row_scale
        case Mxfp4Weight():  # 6 * 2 ** 6 is
            return jnp.ldexp(jnp.float32(1.0), weight.largest_exponent() - (127 + 6))
