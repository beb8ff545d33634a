"""Products of many tokens in 8 bits: quantises the tokens, and picks the kernel."""

from __future__ import annotations

import jax
from jax import Array

from jaxserve_kernels.activation import Activation
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3 import hopper, hopper_bytes, triton
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.quantized_matmul.triton_arguments import operand_of
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Quantized


def launch(
    x: Array | QuantizedTokens,
    weight: Quantized,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `quantized_matmul.api`."""
    if not isinstance(x, QuantizedTokens):
        x = quantized(x, format_for(weight, x.shape[0], config), target=target)
    if config.method != "hopper":
        return triton.launch(
            x, weight, config, out_type, gated=gated, activation=activation, target=target
        )
    if operand_of(weight).bits == 8:
        return hopper_bytes.launch(
            x, weight, config, out_type, gated=gated, activation=activation, target=target
        )
    return hopper.launch(
        x, weight, config, out_type, gated=gated, activation=activation, target=target
    )
