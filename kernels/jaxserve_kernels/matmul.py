"""Products of a step's tokens with weights of any type. The type of the weight picks the operation
that computes them."""

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
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms as BothForms
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
    """A tree of weights in which each `CopiedWeight` is replaced by the part that products of so
    many tokens read."""

    def is_copied(each: Any) -> bool:
        return isinstance(each, CopiedWeight)

    return jax.tree.map(lambda each: _part(each, tokens, target), weights, is_leaf=is_copied)


def _part(weight: Weight, tokens: int, target: Target) -> Array | Quantized:
    """The part of a weight that the product reads: the e4m3 copy or the codes, if it has both."""
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
    """The 8-bit format in which the product reads its tokens; None if it reads them in `dtype`.

    The kernel that computes the tokens may write `QuantizedTokens` of that format directly. Given
    unquantised tokens, the product quantises them in a separate kernel.
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

    The product is the sum over the first axis. There is one part in `dtype` (default: x's), or any
    number of parts in float32. The reader adds them, by `sum_parts` or inside its own kernel.

    A bias [out] is added in float32, before the product is rounded. XLA adds it to the partial
    sums, so a function that contains such a product is not launched by PDL. In a decode step the
    reader of the sums adds the bias instead: `attention_inputs.HeadWeights`, `add_rms_norm`.
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
    """total [tokens, out] plus x [tokens, in] times weight [out, in] transposed, in total's dtype.

    Args:
      biased: the reader adds a bias to the product. The partial sums are float32 then.

    Returns:
      The sum and None, if the product can add total itself. Otherwise total unchanged, and the
      partial sums of `linear`, which the reader adds to it.
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
    """A gated product of x [tokens, in]: [tokens, ffn] in x's dtype::

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
    """Tokens and weight with their inputs in the order in which the weight is stored."""
    if weight.reordered is None:
        return x, weight
    order, stored = weight.reordered
    return quantized_matmul.take_inputs(plain(x), order, target=target), stored


def has_rows(weight: Weight) -> bool:
    """Whether `take_rows` accepts the weight: quantised ones need 8 bits and a scale per row."""
    return is_quantized(weight) and weight.has_rows


def take_rows(weight: Weight, ids: Array, dtype: DTypeLike) -> Array:
    """Rows `ids` [n] of a weight [out, in] as [n, in] in `dtype`: an embedding.

    Raises:
      TypeError: rows cannot be taken from the weight.
    """
    if is_quantized(weight):
        return weight.take_rows(ids).astype(dtype)
    return cast(Array, weight)[ids].astype(dtype)
