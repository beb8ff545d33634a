"""Half-quadratic quantisation to 4 bits: needs no data, and optimises only the zero points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights.int4 import Int4Weight, pack_int4

_NORM, _BETA, _BETA_GROWTH = 0.7, 10.0, 1.01
_LARGEST_INVERSE = 2e4


def quantize_int4_hqq(weight: Array, group: int = 128, iterations: int = 20) -> Int4Weight:
    """Quantises with floating-point zero points that minimise a sparse norm of the error (Badri and
    Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models").

    weight is [..., out, in]. A group's scale spans its values. Each iteration shrinks the errors by
    the proximal operator of |e|^0.7, which separates outliers, and sets the zero point to the mean
    that explains the remaining error. Each group keeps the zero point with the least mean |error|
    of all iterations.
    """
    *leading, out, depth = weight.shape
    wide = weight.astype(jnp.float32).reshape(*leading, out, depth // group, group)
    low, high = (f(wide, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
    inverse = jnp.minimum(15.0 / jnp.where(high > low, high - low, 1.0), _LARGEST_INVERSE)

    def codes_of(zero: Array) -> Array:
        return jnp.clip(jnp.round(wide * inverse + zero), 0.0, 15.0)

    def improve(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        zero, best, least = state
        codes = codes_of(zero)
        error = wide - (codes - zero) / inverse
        size = jnp.abs(error)
        mean = jnp.mean(size, axis=-1, keepdims=True)
        best, least = jnp.where(mean < least, zero, best), jnp.minimum(mean, least)
        beta = _BETA * _BETA_GROWTH ** step.astype(jnp.float32)
        kept = size - jnp.where(size > 0, size, 1.0) ** (_NORM - 1) / beta
        shrunk = jnp.sign(error) * jnp.maximum(kept, 0.0)
        zero = jnp.mean(codes - (wide - shrunk) * inverse, axis=-1, keepdims=True)
        return zero, best, least

    first = -low * inverse
    state = (first, first, jnp.full_like(first, jnp.inf))
    zero = jax.lax.fori_loop(0, iterations + 1, improve, state)[1]
    codes = codes_of(zero).reshape(weight.shape)
    return pack_int4(codes, 1.0 / inverse[..., 0], zero[..., 0])
