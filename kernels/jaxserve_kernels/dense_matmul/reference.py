"""The definition of the products, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.activation import Activation, activate


def linear(x: Array, weight: Array, dtype: DTypeLike) -> Array:
    """x [tokens, in] times weight [out, in] transposed: [1, tokens, out] in `dtype`."""
    return _product(x, weight, dtype)[None]


def gated_linear(x: Array, weight: Array, activation: Activation = "silu") -> Array:
    """A gated product (Shazeer 2020) of x [tokens, in]: [tokens, ffn] in x's dtype::

        activation(x @ gate.T) * (x @ up.T)

    weight is [2 * ffn, in]: the rows of gate, then those of up.
    """
    return gated(_product(x, weight, x.dtype), activation)


def gated(gate_up: Array, activation: Activation) -> Array:
    """activation(gate) * up of gate_up [tokens, 2 * ffn]; the activation is computed in float32."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activate(gate.astype(jnp.float32), activation).astype(up.dtype) * up


def sum_parts(parts: Array, dtype: DTypeLike, bias: Array | None = None) -> Array:
    """Adds partial sums [parts, tokens, out] to the product [tokens, out], in `dtype`.

    A bias [out] is added in float32, before the sum is rounded. With float32 parts, torch's addmm
    does the same.
    """
    total = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    if bias is not None:
        total = total.astype(jnp.float32) + bias.astype(jnp.float32)
    return total.astype(dtype)


def _product(x: Array, weight: Array, dtype: DTypeLike) -> Array:
    """x times the transposed weight, accumulated in float32."""
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
