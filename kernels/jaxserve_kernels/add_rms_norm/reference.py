"""The definition of RMSNorm (Zhang and Sennrich 2019) and of its fusion with a residual add."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.dense_matmul.reference import sum_parts


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis, computed in float32, in x's dtype.

    With a weight of x's dtype the quotient is rounded before the multiplication. With a float32
    weight only the result is rounded.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight.dtype != x.dtype:
        return (wide * scale * weight).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * weight


def add_rms_norm(
    x: Array, update: Array, weight: Array, eps: float, bias: Array | None = None
) -> tuple[Array, Array]:
    """The new residual stream, and its norm, which the next block reads::

        x = x + sum_parts(update, bias)
        return x, rms_norm(x, weight, eps)

    x is [tokens, embed]; weight [embed] has x's dtype or float32. update [parts, tokens, embed] are
    the partial sums of a product. A bias [embed] is added to their sum in float32, before the sum
    is rounded to x's dtype.
    """
    # Without the barrier XLA fuses all earlier updates into each norm, and reads them all again.
    x = jax.lax.optimization_barrier(x + sum_parts(update, x.dtype, bias))
    return x, rms_norm(x, weight, eps)
