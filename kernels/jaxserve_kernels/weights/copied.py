"""4-bit weights with an additional copy in e4m3. Few tokens use the codes, many tokens the copy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.eight_bit import E4M3_MAX, Fp8Weight, pack_fp8
from jaxserve_kernels.weights.format import Quantized


class CopiedWeight(NamedTuple):
    """A weight's codes, and an approximate copy in e4m3: see `e4m3_copy`. The codes define the
    weight.

    Products of few tokens read the codes, which take half the bytes. Products of many tokens read
    the copy, which needs no conversion. `matmul.as_read` decides.
    """

    codes: Quantized
    copy: Fp8Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return self.codes.shape


def e4m3_copy(weight: Quantized) -> Fp8Weight:
    """Converts the weight to e4m3, with the scales of its `e4m3_scale`. Inputs are in the model's
    order.

    Integers times their scales are rounded to e4m3's four significant bits. MXFP4 is exact for all
    blocks whose scale, a power of two, is within 2 ** 14 of the row's largest. NVFP4 is exact for
    values that are a power of two times the block's scale; the others (1.5, 3 and 6) have six
    significant bits and are rounded.

    Layers are converted one at a time, so that only one layer's float32 values are in memory.

    Raises:
      TypeError: the format has no copies.
    """
    if len(weight.shape) > 2:
        return jax.lax.map(e4m3_copy, weight)
    scale = layout.untile_rows(weight.e4m3_scale())
    values = weight.dequantize() * jnp.where(scale == 0, 0.0, 1.0 / scale)
    values = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return pack_fp8(values, scale)
