"""Products of a step's tokens with weights of any type: the type decides who computes them."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels import dense_matmul, quantized_matmul
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.dense_matmul import gated
from jaxserve_kernels.dense_matmul import sum_parts as sum_parts
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens as QuantizedTokens
from jaxserve_kernels.quantized_matmul.e4m3.tokens import TokenFormat
from jaxserve_kernels.quantized_matmul.e4m3.tokens import plain as plain
from jaxserve_kernels.quantized_matmul.rules import reads_copy
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import (
    CopiedWeight,
    Quantized,
    Weight,
    is_quantized,
)


def as_read[Tree](weights: Tree, tokens: int, *, target: Target) -> Tree:
    """A tree of weights without what products of so many tokens do not read."""

    def is_copied(each: Any) -> bool:
        return isinstance(each, CopiedWeight)

    return jax.tree.map(lambda each: _part(each, tokens, target), weights, is_leaf=is_copied)


def _part(weight: Weight, tokens: int, target: Target) -> Array | Quantized:
    """Of a weight that has a copy either that or the codes."""
    if not isinstance(weight, CopiedWeight):
        return weight
    return weight.copy if reads_copy(tokens, target) else weight.codes


def token_format(
    weight: Weight | None,
    tokens: int,
    dtype: DTypeLike,
    *,
    gated: bool = False,
    activation: Activation = "silu",
    target: Target,
) -> TokenFormat | None:
    """What a product with the weight reads in place of tokens in `dtype`: None, those, or 8 bits.

    Whoever makes the tokens may make `QuantizedTokens` of that format at once; given others, the
    product does it in a kernel of its own.
    """
    if weight is None:
        return None
    weight = _part(weight, tokens, target)
    if is_quantized(weight):
        return quantized_matmul.token_format(
            weight, tokens, dtype, activation if gated else None, target=target
        )
    return None


def linear(
    x: Array | QuantizedTokens,
    weight: Weight,
    dtype: DTypeLike | None = None,
    *,
    bias: Array | None = None,
    target: Target,
) -> Array:
    """x [tokens, in] times weight [out, in] transposed, as partial sums [parts, tokens, out].

    Their sum over the first axis is the product: one part in `dtype` (x's if not given), or any
    number in float32. Readers add them, by `sum_parts` or inside their own kernel.

    A bias [out] is added in float32, before the product is rounded. No kernel does that: XLA adds
    it to the partial sums, and what holds such a product is not launched by PDL. Biases of a decode
    step belong to who reads the sums: `attention_inputs.HeadWeights`, `add_rms_norm`.
    """
    if bias is not None:
        return sum_parts(linear(x, weight, jnp.float32, target=target), dtype or x.dtype, bias)[
            None
        ]
    weight = _part(weight, x.shape[0], target)
    if is_quantized(weight):
        x, weight = _in_order(x, weight, target)
        return quantized_matmul.linear(x, weight, dtype, target=target)
    return dense_matmul.linear(plain(x), cast(Array, weight), dtype, target=target)


def add_linear(
    total: Array,
    x: Array | QuantizedTokens,
    weight: Weight,
    *,
    biased: bool = False,
    target: Target,
) -> tuple[Array, Array | None]:
    """total [tokens, out] plus x [tokens, in] times weight [out, in] transposed, of total's dtype.

    Args:
      biased: the reader adds a bias to the product, whose partial sums are in float32 then.

    Returns:
      The sum and None, where the product takes total in; else total as it was, and partial sums as
      of `linear` that its reader adds.
    """
    if biased:
        return total, linear(x, weight, jnp.float32, target=target)
    weight = _part(weight, x.shape[0], target)
    if is_quantized(weight):
        return total, linear(x, weight, target=target)
    return dense_matmul.add_linear(total, plain(x), cast(Array, weight), target=target)


def gated_linear(
    x: Array | QuantizedTokens,
    weight: Weight,
    *,
    bias: Array | None = None,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """A gated product of x [tokens, in], [tokens, ffn] in x's dtype::

        activation(x @ gate.T) * (x @ up.T)

    weight is [2 * ffn, in]: the rows of gate, then those of up. A bias [2 * ffn] is added to the
    products as in `linear`.
    """
    if bias is not None:
        return gated(linear(x, weight, bias=bias, target=target)[0], activation)
    weight = _part(weight, x.shape[0], target)
    if is_quantized(weight):
        x, weight = _in_order(x, weight, target)
        return quantized_matmul.gated_linear(x, weight, activation, target=target)
    return dense_matmul.gated_linear(plain(x), cast(Array, weight), activation, target=target)


def _in_order(
    x: Array | QuantizedTokens, weight: Quantized, target: Target
) -> tuple[Array | QuantizedTokens, Quantized]:
    """Tokens and weight with their inputs as the weight is stored."""
    if weight.reordered is None:
        return x, weight
    order, stored = weight.reordered
    return quantized_matmul.take_inputs(plain(x), order, target=target), stored


def has_rows(weight: Weight) -> bool:
    """Whether rows can be taken from a quantised weight: 8 bits with a scale per row."""
    return is_quantized(weight) and weight.has_rows


def take_rows(weight: Weight, ids: Array, dtype: DTypeLike) -> Array:
    """Rows `ids` [n] of a weight [out, in] as [n, in] in `dtype`: an embedding.

    Raises:
      TypeError: rows cannot be taken from the weight.
    """
    if is_quantized(weight):
        return weight.take_rows(ids).astype(dtype)
    return cast(Array, weight)[ids].astype(dtype)
