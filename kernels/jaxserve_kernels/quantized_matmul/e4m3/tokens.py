"""Tokens in 8 bits, as products of many tokens read them: made by whichever kernel has them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.weights import Quantized


class QuantizedTokens(NamedTuple):
    """Codes times scales. Rows past the tokens make whole tiles: they hold anything."""

    codes: Array
    """e4m3 or int8 [padded, k], the inputs of each 128 in the `Order` of the product."""
    scale: Array
    """float32 [tokens]."""
    sums: Array
    """float32 [groups, padded]: of the codes of inputs that share a scale of the weight's."""

    @property
    def shape(self) -> tuple[int, int]:
        """[tokens, k]"""
        return self.scale.shape[0], self.codes.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the tokens that became these."""
        return jnp.dtype(jnp.bfloat16)


def plain(x: Array | QuantizedTokens) -> Array:
    """x, for a product that does not read 8 bits.

    Raises:
      TypeError: somebody made them for a product that did not ask for them.
    """
    if isinstance(x, QuantizedTokens):
        raise TypeError("a product was given tokens in 8 bits, but reads plain ones")
    return x


class Order(IntEnum):
    """In which the inputs of each 128 lie."""

    INPUTS = 0
    BYTES = 1
    """As weights in bytes: byte i is input 64 * (i % 2) + i // 2."""
    WORDS = 2
    """As `hopper` takes e2m1 from words of which 32 hold 128 inputs."""
    HALF_WORDS = 3
    """As it takes e2m1 from words of which 16 hold 64 inputs."""


class TokenFormat(NamedTuple):
    """What a product's weight and tiles ask of its tokens."""

    dtype: DTypeLike
    order: Order
    group: int
    """Inputs of a sum; 0: no sums."""
    padded: int


def format_for(weight: Quantized, tokens: int, config: Config) -> TokenFormat:
    """Of the tokens of a product that is launched as `config` says."""
    operand = weight.operand
    assert operand is not None, f"no kernel knows {type(weight)}"
    in_bytes = config.beforehand or operand.bits == 8
    order = Order.BYTES if in_bytes else Order.INPUTS
    if config.method == "hopper" and not in_bytes and not operand.sums:
        order = Order.WORDS if operand.inputs_per_tile == 128 else Order.HALF_WORDS
    return TokenFormat(
        dtype=jnp.int8 if operand.tokens_in == "int8" else jnp.float8_e4m3fn,
        order=order,
        group=operand.group if operand.sums and not in_bytes else 0,
        padded=-(-tokens // config.tokens) * config.tokens,
    )
