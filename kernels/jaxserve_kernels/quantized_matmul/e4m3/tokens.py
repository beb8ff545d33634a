"""Tokens in 8 bits, as products of many tokens read them: made by whichever kernel has them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.weights import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight


class QuantizedTokens(NamedTuple):
    """Codes times scales. Rows past the tokens make whole tiles: they hold anything."""

    codes: Array
    """e4m3 or int8 [padded, k]. For weights in bytes they are in the order in which those lie:
    byte i of each 128 is input 64 * (i % 2) + i // 2."""
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


class TokenFormat(NamedTuple):
    """What a product's weight and tiles ask of its tokens."""

    dtype: DTypeLike
    group: int
    """Inputs of a sum; 0: no sums, and the order of weights in bytes."""
    padded: int


def format_for(weight: QuantizedWeight, tokens: int, config: Config) -> TokenFormat:
    """Of the tokens of a product that is launched as `config` says."""
    in_bytes = config.beforehand or isinstance(weight, Fp8Weight | Int8Weight)
    return TokenFormat(
        dtype=jnp.int8 if isinstance(weight, Int8Weight) else jnp.float8_e4m3fn,
        group=0 if in_bytes else weight.group if isinstance(weight, Int4Weight) else 128,
        padded=-(-tokens // config.tokens) * config.tokens,
    )
