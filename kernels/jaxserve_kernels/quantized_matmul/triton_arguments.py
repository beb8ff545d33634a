"""Kernel arguments of a product: a quantised weight's arrays and constants, and the tokens."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from jax import Array

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, format_for, plain
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Kind, Operand, Quantized

OTHER: tl.constexpr = tl.constexpr(Kind.OTHER.value)
INT8: tl.constexpr = tl.constexpr(Kind.INT8.value)
FP8: tl.constexpr = tl.constexpr(Kind.FP8.value)
INT4: tl.constexpr = tl.constexpr(Kind.INT4.value)
NVFP4: tl.constexpr = tl.constexpr(Kind.NVFP4.value)
MXFP4: tl.constexpr = tl.constexpr(Kind.MXFP4.value)

NO_ZERO: tl.constexpr = tl.constexpr(0)
ZERO: tl.constexpr = tl.constexpr(1)


def operand_of(weight: Quantized) -> Operand:
    """The weight's operand. The weight must be one that a kernel was chosen for."""
    operand = weight.operand
    assert operand is not None, f"no kernel knows {type(weight)}"
    return operand


def arrays(weight: Quantized) -> tuple[Array, Array, Array]:
    """See `weights.Operand.arrays`."""
    return operand_of(weight).arrays


def kind(weight: Quantized) -> dict[str, Any]:
    """See `weights.Operand.constants`."""
    return operand_of(weight).constants


def tokens_of(
    x: Array | QuantizedTokens, weight: Quantized, config: Config, target: Target
) -> tuple[Array, Array, Array]:
    """Tokens as kernel arguments: in int8, their scales and sums; or plain ones three times."""
    if not config.int8_tokens:
        return (plain(x),) * 3
    if not isinstance(x, QuantizedTokens):
        x = quantized(plain(x), format_for(weight, x.shape[0], config), target=target)
    return x.codes, x.scale, x.sums
