"""Products of many tokens in 8 bits: makes those of the tokens, and picks the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3 import hopper, hopper_bytes, triton
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.weights import Fp8Weight, QuantizedWeight


def linear(
    x: Array | QuantizedTokens, weight: QuantizedWeight, config: Config, dtype: DTypeLike
) -> Array:
    """Partial sums [config.splits, tokens, out]: float32, or `dtype` where there is one part."""
    dtype = dtype if config.splits == 1 else jnp.float32
    shape = (config.splits, x.shape[0], weight.shape[0])
    return _product(x, weight, config, jax.ShapeDtypeStruct(shape, dtype), gated=False)


def gated_linear(x: Array | QuantizedTokens, weight: QuantizedWeight, config: Config) -> Array:
    """[tokens, ffn] in x's dtype; `config.splits` must be 1."""
    shape = (x.shape[0], weight.shape[0] // 2)
    return _product(x, weight, config, jax.ShapeDtypeStruct(shape, x.dtype), gated=True)


def _product(
    x: Array | QuantizedTokens,
    weight: QuantizedWeight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
) -> Array:
    if not isinstance(x, QuantizedTokens):
        x = quantized(x, format_for(weight, x.shape[0], config))
    if config.method != "hopper":
        return triton.launch(x, weight, config, out_type, gated=gated)
    if isinstance(weight, Fp8Weight):
        return hopper_bytes.launch(x, weight, config, out_type, gated=gated)
    return hopper.launch(x, weight, config, out_type, gated=gated)
