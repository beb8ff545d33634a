"""Types of tokens in 8 bits, which products of many tokens read and the preceding kernel may
make."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.weights import Kind, Operand, Quantized

SUMS = 64
"""Sums that follow a token's codes: they take as many bytes as 128 codes."""


class QuantizedTokens(NamedTuple):
    """Tokens as codes times scales. Rows past the tokens fill up tiles; their content is
    undefined."""

    codes: Array
    """e4m3 or int8 [padded, k]. Each 128 inputs are in the `Order` of the product."""
    scale: Array
    """float32 [tokens]; with a scale for some inputs only, [k / inputs, tokens]."""
    sums: Array
    """float32 [groups, padded]: sums of the codes over the inputs that share a scale of the
    weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """[tokens, k]"""
        return self.scale.shape[-1], self.codes.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the tokens before quantisation."""
        return jnp.dtype(jnp.bfloat16)


class BothForms(NamedTuple):
    """Tokens for several readers, of which some take 8 bits."""

    plain: Array
    """[tokens, k]"""
    quantized: QuantizedTokens

    @property
    def shape(self) -> tuple[int, ...]:
        """[tokens, k]"""
        return self.plain.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the plain tokens."""
        return self.plain.dtype


def plain(x: Array | QuantizedTokens | BothForms) -> Array:
    """x, for a product that does not read 8 bits.

    Raises:
      TypeError: x is in 8 bits only.
    """
    if isinstance(x, BothForms):
        return x.plain
    if isinstance(x, QuantizedTokens):
        raise TypeError("a product was given tokens in 8 bits, but reads plain ones")
    return x


def int8_form(x: Array | BothForms) -> QuantizedTokens | None:
    """The tokens' int8 form, if that is their other one."""
    if isinstance(x, BothForms) and x.quantized.codes.dtype == jnp.int8:
        return x.quantized
    return None


class Order(IntEnum):
    """Orders of the inputs within each 128."""

    INPUTS = 0
    BYTES = 1
    """The order of weights in bytes, and of 4-bit codes that become int8: byte i is input
    64 * (i % 2) + i // 2."""
    WORDS = 2
    """The order in which `hopper` extracts NVFP4's codes."""
    PLANES = 3
    """The order of MXFP4's planes: see `weights.layout.swap_eights`."""
    EIGHTHS = 4
    """The order in which `hopper_mxfp4.looked_up` returns MXFP4's codes: byte i is input
    8 * (i % 16) + i // 16."""


class TokenFormat(NamedTuple):
    """The format in which a product reads its tokens."""

    dtype: DTypeLike
    order: Order
    group: int
    """Inputs per entry of `sums`; 0: no sums."""
    padded: int
    inputs: int | None = None
    """Codes of a token if it has fewer inputs than the weight; those past its inputs are 0."""
    scale_group: int = 0
    """Inputs of a token that share a scale; 0: all of them."""
    beside: bool = False
    """Whether a token's sums follow its codes, as SUMS numbers in bfloat16, rather than being an
    array of their own. Those past its groups are 0."""


def int8_format(operand: Operand, tokens: int) -> TokenFormat:
    """The format of int8 tokens that are multiplied with 4-bit integers in groups of 128, or with
    MXFP4."""
    group = operand.group if operand.zero else 0
    order = Order.EIGHTHS if operand.kind == Kind.MXFP4 else Order.BYTES
    return TokenFormat(jnp.int8, order, group, tokens, scale_group=128)


def format_for(weight: Quantized, tokens: int, config: Config) -> TokenFormat:
    """The token format of a product with this configuration."""
    operand = weight.operand
    assert operand is not None, f"no kernel knows {type(weight)}"
    if config.int8_tokens:
        return int8_format(operand, tokens)
    in_bytes = config.beforehand or operand.bits == 8
    order = Order.BYTES if in_bytes else Order.INPUTS
    if operand.kind == Kind.MXFP4 and not in_bytes:
        order = Order.EIGHTHS if config.method == "hopper" else Order.PLANES
    elif operand.kind == Kind.NVFP4 and config.method == "hopper" and not in_bytes:
        order = Order.WORDS
    return TokenFormat(
        dtype=jnp.int8 if operand.tokens_in == "int8" else jnp.float8_e4m3fn,
        order=order,
        group=operand.group if operand.sums and not in_bytes else 0,
        padded=-(-tokens // config.tokens) * config.tokens,
    )
