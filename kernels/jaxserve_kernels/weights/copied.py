"""4-bit weights with a copy in e4m3 beside them: codes for few tokens, the copy for many."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.eight_bit import E4M3_MAX, Fp8Weight, pack_fp8
from jaxserve_kernels.weights.format import Quantized


class CopiedWeight(NamedTuple):
    """A weight is what its codes mean; the copy is near it, `e4m3_copy` says how near.

    Products of few tokens read the codes, which are half the bytes, those of many the copy, which
    nothing has to be made of: `matmul.as_read` decides.
    """

    codes: Quantized
    copy: Fp8Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return self.codes.shape


def e4m3_copy(weight: Quantized) -> Fp8Weight:
    """The weight in e4m3, with the scales of its `e4m3_scale`; inputs lie in the model's order.

    Integers and their scales are rounded to e4m3's four significant bits. The values of MXFP4 fit
    exactly, because its scales are powers of two: all within 2 ** 14 of their row's largest. So do
    those of NVFP4 that are powers of two times their block's scale; the others (1.5, 3 and 6) have
    six significant bits and are rounded. Layers are made one after the other, so that values in
    float32 are there of one only.

    Raises:
      TypeError: the weight cannot be copied.
    """
    if len(weight.shape) > 2:
        return jax.lax.map(e4m3_copy, weight)
    scale = layout.untile_rows(weight.e4m3_scale())
    values = weight.dequantize() * jnp.where(scale == 0, 0.0, 1.0 / scale)
    values = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return pack_fp8(values, scale)
