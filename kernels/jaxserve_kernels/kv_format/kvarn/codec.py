"""The codec of KVarN (arXiv 2606.03458) in plain JAX: rotation, normalisation, rounding.

A tile is [tokens, head_dim] of one head. Keys are rotated after QK-norm and RoPE, values as the
projection gives them. Everything in the cache is rotated. For keys, rows are channels and columns
are tokens; for values, rows are tokens and columns are channels. An element decodes as::

    (code * row_scale + row_zero) * column_scale
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

KEY_ITERATIONS, KEY_FLOOR = 2, -5.0
VALUE_ITERATIONS, VALUE_FLOOR = 2, -0.3
"""Passes of the normalisation, and the lower bound of a scale's logarithm.

The published floor of -0.3 does not amplify rows and columns of small variance. For keys that costs
accuracy if token scales differ. For values a lower floor and more passes cost accuracy if channels
have nonzero means, because a value's zero point belongs to the token. With a floor below -5 a tile
without variance would get zero points beyond float16.
"""

_CEILING = 10.0
_STD_RANGE = 1e-3, 1e3
FLOAT16_MAX = 65504.0


class Coded(NamedTuple):
    """One tile's codes and float16 scales, rows before columns as above."""

    codes: Array  # uint8 [..., rows, columns]
    row_scale: Array  # [..., rows]
    row_zero: Array  # [..., rows]
    column_scale: Array  # [..., columns]


def hadamard(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix [size, size] divided by sqrt(size). It is its own inverse. size
    is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def rotate(x: Array) -> Array:
    """x [..., head_dim] times the Hadamard matrix, in x's dtype. Twice is the identity."""
    matrix = jnp.asarray(hadamard(x.shape[-1]))
    return jnp.matmul(x.astype(jnp.float32), matrix, precision="highest").astype(x.dtype)


def encode(x: Array, *, bits: int, iterations: int, floor: float) -> Coded:
    """Encodes a tile, float32 [..., rows, columns], with `bits` bits per element."""
    row, column = _scales(x, iterations, floor)
    balanced = x / column[..., None, :] / row[..., None]
    levels = (1 << bits) - 1
    zero, top = balanced.min(-1), balanced.max(-1)
    step = jnp.maximum((top - zero) / levels, 1e-10)
    codes = jnp.clip(jnp.round((balanced - zero[..., None]) / step[..., None]), 0, levels)
    half = jnp.float16
    return Coded(
        codes.astype(jnp.uint8),
        (row * step).astype(half),
        jnp.clip(row * zero, -FLOAT16_MAX, FLOAT16_MAX).astype(half),
        column.astype(half),
    )


def decode(coded: Coded) -> Array:
    """Decodes a tile: float32 [..., rows, columns]."""
    wide = [part.astype(jnp.float32) for part in coded]
    codes, row_scale, row_zero, column_scale = wide
    return (codes * row_scale[..., None] + row_zero[..., None]) * column_scale[..., None, :]


def encode_keys(keys: Array) -> Coded:
    """Encodes rotated keys, float32 [..., tokens, head_dim], with 4 bits per element."""
    x = jnp.swapaxes(keys, -1, -2)
    return encode(x, bits=4, iterations=KEY_ITERATIONS, floor=KEY_FLOOR)


def encode_values(values: Array, bits: int) -> Coded:
    """Encodes rotated values, float32 [..., tokens, head_dim], with `bits` bits per element."""
    return encode(values, bits=bits, iterations=VALUE_ITERATIONS, floor=VALUE_FLOOR)


def _scales(x: Array, iterations: int, floor: float) -> tuple[Array, Array]:
    """Row and column scales that bring the variance of every row and column near 1.

    Each pass divides columns, then rows, by their standard deviations, with bounded logarithms of
    the scales. The result is the most balanced of all states, including the first (no scales).
    """
    log_row, log_column = jnp.zeros(x.shape[:-1]), jnp.zeros((*x.shape[:-2], x.shape[-1]))
    best_row, best_column, best = jnp.exp(log_row), jnp.exp(log_column), _imbalance(x)
    current = x
    for _ in range(iterations):
        log_column = jnp.clip(log_column + _log_std(current, -2), floor, _CEILING)
        current = x * jnp.exp(-log_column)[..., None, :] * jnp.exp(-log_row)[..., None]
        log_row = jnp.clip(log_row + _log_std(current, -1), floor, _CEILING)
        current = x * jnp.exp(-log_column)[..., None, :] * jnp.exp(-log_row)[..., None]
        found = _imbalance(current)
        better = (found <= best)[..., None]
        best_row = jnp.where(better, jnp.exp(log_row), best_row)
        best_column = jnp.where(better, jnp.exp(log_column), best_column)
        best = jnp.minimum(found, best)
    return best_row, best_column


def _std(x: Array, axis: int) -> Array:
    return jnp.std(x, axis=axis, ddof=1)


def _log_std(x: Array, axis: int) -> Array:
    return jnp.log(jnp.clip(_std(x, axis), *_STD_RANGE))


def _imbalance(x: Array) -> Array:
    """Largest over smallest standard deviation of the columns, plus that of the rows."""
    columns, rows = _std(x, -2), _std(x, -1)
    return columns.max(-1) / jnp.maximum(columns.min(-1), 1e-8) + rows.max(-1) / jnp.maximum(
        rows.min(-1), 1e-8
    )
