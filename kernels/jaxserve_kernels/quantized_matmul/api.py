"""Products with quantised weights: picks the implementation by target, format, shape and tokens.

The definition is the product with the weight dequantised and rounded to x's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels import dense_matmul
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, Refusal, anything
from jaxserve_kernels.quantized_matmul.config import Call, Config, Method
from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    QuantizedTokens,
    TokenFormat,
    format_for,
    plain,
)
from jaxserve_kernels.quantized_matmul.rules import RULES, configure, reads_quantized
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Quantized


def linear(
    x: Array | QuantizedTokens,
    weight: Quantized,
    dtype: DTypeLike | None = None,
    *,
    target: Target,
) -> Array:
    """See `matmul.linear`."""
    return _OP(x, weight, dtype=jnp.dtype(dtype or x.dtype), activation=None, target=target)


def gated_linear(
    x: Array | QuantizedTokens,
    weight: Quantized,
    activation: Activation = "silu",
    *,
    target: Target,
) -> Array:
    """See `matmul.gated_linear`."""
    return _OP(x, weight, dtype=jnp.dtype(x.dtype), activation=activation, target=target)


def _launch(
    config: Config,
    x: Array | QuantizedTokens,
    weight: Quantized,
    *,
    dtype: DTypeLike,
    activation: Activation | None,
    target: Target,
) -> Array:
    """Runs the configured kernel. The product is gated if there is an activation."""
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
    """Permutes the inputs of x [tokens, in]: x[:, order], with order int32 [in]. With PDL this is a
    Triton kernel, otherwise a gather by XLA."""
    if not target.pdl:
        return x[:, order]
    from jaxserve_kernels.quantized_matmul import triton_order  # needs Triton: only for GPUs

    return triton_order.take_inputs(x, order, target=target)


def token_format(
    weight: Quantized,
    tokens: int,
    dtype: DTypeLike,
    activation: Activation | None,
    *,
    target: Target,
) -> TokenFormat | None:
    """The 8-bit format of tokens that the product reads; None if their maker should leave them in
    `dtype`."""
    plain = jax.ShapeDtypeStruct((tokens, weight.shape[1]), dtype)
    config = _OP.choose(
        plain, weight, dtype=jnp.dtype(dtype), activation=activation, target=target
    ).config
    operand = weight.operand
    if config is None or operand is None:
        return None
    if not reads_quantized(operand, tokens, config, target):
        return None
    return format_for(weight, tokens, config)


def _implementation(name: str, rule: Callable[[Call], Config | Refusal]) -> Implementation:
    def configured(
        x: Any, weight: Quantized, *, activation: Activation | None, target: Target, **_: Any
    ) -> Config | Refusal:
        if not target.uses_triton():
            return NO_KERNELS
        if x.dtype != jnp.bfloat16:
            return Refusal("not in bfloat16")
        call = Call.of(
            weight,
            x.shape[0],
            gated=activation is not None,
            hopper=target.runs_hopper_kernels(),
            e4m3=target.gpu.compute_capability >= 89,
            target=target,
        )
        return configure(call, rule)

    return Implementation(name=name, configure=configured, run=_launch)


def _dequantised(
    _: None,
    x: Array | QuantizedTokens,
    weight: Quantized,
    *,
    dtype: DTypeLike,
    activation: Activation | None,
    target: Target,
) -> Array:
    whole = weight.dequantize().astype(x.dtype)
    if activation is None:
        return dense_matmul.linear(plain(x), whole, dtype, target=target)
    return dense_matmul.gated_linear(plain(x), whole, activation, target=target)


def _name(x: Any, weight: Quantized, *, activation: Activation | None, **_: Any) -> str:
    return f"{'gated_' if activation else ''}linear_{type(weight).__name__}"


def _plain_tokens(x: Any, weight: Quantized) -> tuple[Any, Quantized]:
    """Arguments with plain tokens, for `Op.probe`: the test compilation is the same for tokens that
    are quantised beforehand."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype), weight


_OP = Op(
    name=_name,
    implementations=(
        *(_implementation(name, rule) for name, rule in RULES.items()),
        Implementation(name="dequantise", configure=anything, run=_dequantised, kernels=False),
    ),
    describe=lambda _, weight, **__: f"weight {' x '.join(map(str, weight.shape))}",
    probe=_plain_tokens,
)


_MODULES: dict[Method, str] = {
    "small_m": "triton_small_m",
    "streaming": "triton_streaming",
    "stream_k": "triton_stream_k",
    "large_n": "triton_large_n",
    "unpack": "triton",
    "e4m3": "e4m3.api",
    "hopper": "e4m3.api",
}


def _kernels(config: Config) -> Any:
    """The module that implements the method. Importing it needs Triton, so only on GPUs.

    Its `launch(x, weight, config, out_type, gated=...)` returns [config.splits, tokens, out], in
    float32 if there are several splits; or, gated, [tokens, ffn].
    """
    return importlib.import_module(f"{__package__}.{_MODULES[config.method]}")
