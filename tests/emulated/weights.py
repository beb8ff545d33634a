"""Weights in every format, and tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_kernels import weights
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.tokens import format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.target import Target
from tests.emulator.targets import HOPPER


def with_zeros(weight: Any) -> weights.Int4Weight:
    packed = weights.quantize_int4(weight)
    zeros = np.random.default_rng(1).integers(0, 16, packed.scale.shape, np.int32)
    return packed._replace(zero=jnp.asarray(zeros))


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int4-g32": functools.partial(weights.quantize_int4, group=32),
    "int4-zeros": with_zeros,
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "fp8-blocks": functools.partial(weights.quantize_fp8, group=128),
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}


def tokens_and_weight(
    tokens: int, out: int, depth: int, quantize: Callable[[Any], Any]
) -> tuple[jax.Array, Any]:
    """bfloat16 [tokens, depth], and a weight [out, depth] whose rows are of different sizes."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    sizes = np.exp(0.5 * rng.standard_normal((out, 1)))
    values = rng.standard_normal((out, depth)) * sizes * depth**-0.5
    return x, quantize(jnp.asarray(values, jnp.float32))


def tokens_in_8_bits(x: jax.Array, weight: Any) -> np.ndarray[Any, Any]:
    """What a product with the weight makes of x, in the order of its inputs: float32."""
    as_is = weights.quantize_int4(jnp.zeros((64, x.shape[1]), jnp.float32))
    form = format_for(as_is, x.shape[0], Config(method="e4m3", tokens=16))
    if isinstance(weight, weights.Int8Weight):
        form = form._replace(dtype=jnp.int8)
    tokens = quantized(x, form._replace(group=0), target=HOPPER)
    codes = np.asarray(tokens.codes[: x.shape[0]], np.float32)
    return codes * np.asarray(tokens.scale)[:, None]


def as_read(x: jax.Array, config: Config) -> np.ndarray[Any, Any]:
    """Tokens [tokens, depth] as a streaming product reads them, float32."""
    return in_int8(x) if config.int8_tokens else np.asarray(x, np.float32)


def in_int8(x: jax.Array) -> np.ndarray[Any, Any]:
    """Tokens [tokens, depth] rounded to int8 with a scale for each 128 inputs, float32."""
    values = np.asarray(x, np.float32)
    groups = values.reshape(len(values), -1, 128)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    codes = np.round(groups * (1 / np.where(scale > 0, scale, np.float32(1))))
    return (codes * scale).reshape(values.shape)


def product(
    kernels: Any, x: Any, weight: Any, config: Config, target: Target = HOPPER
) -> np.ndarray[Any, Any]:
    """The float32 sum of the parts that a module's kernel gives for tokens x [tokens, depth]."""
    shape = (config.splits, x.shape[0], weight.shape[0])
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return np.asarray(kernels.launch(x, weight, config, out_type, gated=False, target=target)).sum(
        0
    )


def gated_product(
    kernels: Any,
    x: Any,
    weight: Any,
    config: Config,
    activation: Activation = "silu",
    *,
    target: Target = HOPPER,
) -> np.ndarray[Any, Any]:
    """What a module's kernel gives for a weight of gate and up, in float32."""
    out_type = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0] // 2), jnp.bfloat16)
    both = kernels.launch(
        x, weight, config, out_type, gated=True, activation=activation, target=target
    )
    return np.asarray(both, np.float32)


def exact(x: Any, weight: Any) -> np.ndarray[Any, Any]:
    """The product with what the weight means, in float32."""
    return np.asarray(x, np.float32) @ np.asarray(weight.dequantize()).T


def gating(both: Any, activation: Activation = "silu") -> np.ndarray[Any, Any]:
    """activation(gate) * up of [tokens, 2 * ffn], rounded where the definition rounds."""
    gate, up = (
        part.astype(jnp.bfloat16).astype(np.float32)
        for part in np.split(np.asarray(both, np.float32), 2, axis=1)
    )
    if activation == "silu":
        active = gate / (1 + np.exp(-gate))
    else:
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (
        (active.astype(jnp.bfloat16).astype(np.float32) * up)
        .astype(jnp.bfloat16)
        .astype(np.float32)
    )
