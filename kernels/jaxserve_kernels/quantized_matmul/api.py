"""Products with quantised weights: picks the implementation by target, format, shape and tokens.

The definition is the product with the weight dequantised and rounded to x's dtype.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels import dense_matmul
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.quantized_matmul.config import Config, Method, choose, reads_quantized
from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    QuantizedTokens,
    TokenFormat,
    format_for,
    plain,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import QuantizedWeight


def linear(
    x: Array | QuantizedTokens,
    weight: QuantizedWeight,
    dtype: DTypeLike | None = None,
    *,
    target: Target,
) -> Array:
    """See `matmul.linear`."""
    dtype = dtype or x.dtype
    config = _config(x, weight, None, target=target)
    if config is None:
        return dense_matmul.linear(
            plain(x), weight.dequantize().astype(x.dtype), dtype, target=target
        )
    return _launch(x, weight, config, dtype, None, target=target)


def gated_linear(
    x: Array | QuantizedTokens,
    weight: QuantizedWeight,
    activation: Activation = "silu",
    *,
    target: Target,
) -> Array:
    """See `matmul.gated_linear`."""
    config = _config(x, weight, activation, target=target)
    if config is None:
        plain_weight = weight.dequantize().astype(x.dtype)
        return dense_matmul.gated_linear(plain(x), plain_weight, activation, target=target)
    return _launch(x, weight, config, x.dtype, activation, target=target)


def _launch(
    x: Array | QuantizedTokens,
    weight: QuantizedWeight,
    config: Config,
    dtype: DTypeLike,
    activation: Activation | None,
    *,
    target: Target,
) -> Array:
    """Gated, if there is an activation."""
    tokens, out = x.shape[0], weight.shape[0]
    if activation is not None:
        out_type = jax.ShapeDtypeStruct((tokens, out // 2), dtype)
    else:
        out_dtype = dtype if config.splits == 1 else jnp.float32
        out_type = jax.ShapeDtypeStruct((config.splits, tokens, out), out_dtype)
    launch = _kernels(config).launch
    if activation is None:
        return launch(x, weight, config, out_type, gated=False, target=target)
    return launch(x, weight, config, out_type, gated=True, activation=activation, target=target)


def take_inputs(x: Array, order: Array, *, target: Target) -> Array:
    """x [tokens, in] with its inputs in that order: x[:, order], of which order int32 [in] is a
    permutation. In a chain that is a kernel; elsewhere XLA gathers."""
    if not target.pdl:
        return x[:, order]
    from jaxserve_kernels.quantized_matmul import triton_order  # needs Triton: only for GPUs

    return triton_order.take_inputs(x, order, target=target)


def token_format(
    weight: QuantizedWeight,
    tokens: int,
    dtype: DTypeLike,
    activation: Activation | None,
    *,
    target: Target,
) -> TokenFormat | None:
    """What the product reads in place of tokens in `dtype`, if that should be made beforehand."""
    config = _config(
        jax.ShapeDtypeStruct((tokens, weight.shape[1]), dtype), weight, activation, target=target
    )
    if config is None or not reads_quantized(weight, tokens, config):
        return None
    return format_for(weight, tokens, config)


def _config(
    x: Any, weight: QuantizedWeight, activation: Activation | None, *, target: Target
) -> Config | None:
    """None: dequantise, then the product with the plain weight."""
    if not target.uses_triton() or x.dtype != jnp.bfloat16:
        return None
    hopper, e4m3 = target.runs_hopper_kernels(), target.gpu.compute_capability >= 89
    config = choose(
        weight, x.shape[0], gated=activation is not None, hopper=hopper, e4m3=e4m3, target=target
    )
    known = config is not None and _compiles(weight, x.shape[0], config, activation, target=target)
    return config if known else None


def _compiles(
    weight: QuantizedWeight,
    tokens: int,
    config: Config,
    activation: Activation | None,
    *,
    target: Target,
) -> bool:
    """Asked for plain tokens: whoever makes 8 bits of them beforehand asks here, too."""
    x = jax.ShapeDtypeStruct((tokens, weight.shape[1]), jnp.bfloat16)

    def product(x: Array, weight: QuantizedWeight) -> Array:
        return _launch(x, weight, config, x.dtype, activation, target=target)

    name = f"{'gated_' if activation else ''}linear_{type(weight).__name__}"
    return compiles(name, product, x, weight, static=(config, activation), target=target)


_MODULES: dict[Method, str] = {
    "few": "triton_few",
    "stream": "triton_streaming",
    "share": "triton_sharing",
    "tall": "triton_tall",
    "unpack": "triton",
    "e4m3": "e4m3.api",
    "hopper": "e4m3.api",
}


def _kernels(config: Config) -> Any:
    """The module that launches the method; it needs Triton: only for GPUs.

    `launch(x, weight, config, out_type, gated=...)` is [config.splits, tokens, out], float32 where
    there are several splits; or, gated, [tokens, ffn].
    """
    return importlib.import_module(f"{__package__}.{_MODULES[config.method]}")
