"""Activation-aware quantisation: statistics of a weight's inputs decide how it is rounded.

Lin et al. 2024, "AWQ: Activation-aware Weight Quantization" (arXiv 2306.00978). Weights of inputs
with large activations are scaled up, which makes their relative rounding errors smaller. The layer
that makes the activations divides them by the same factors. The error is that of the product over
the calibration data, computed exactly from the inputs' second moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights.int4 import Int4Weight, pack_int4

_RATIOS = 20
_SHRINKS = 11


class InputStatistics(NamedTuple):
    """Statistics of the inputs x of a product, over all tokens."""

    mean: Array  # float32 [in]: mean |x|
    moment: Array  # float32 [in, in]: mean x x^T


def statistics(x: Array) -> InputStatistics:
    """Computes the statistics of x [tokens, in]."""
    wide = x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        moment = wide.T @ wide / wide.shape[0]
    return InputStatistics(jnp.mean(jnp.abs(wide), axis=0), moment)


def output_error(difference: Array, moment: Array) -> Array:
    """Mean square of |x @ difference.T| over the tokens; difference [out, in]."""
    with jax.default_matmul_precision("highest"):
        return jnp.sum((difference @ moment) * difference)


def search_scale(
    weight: Array, inputs: InputStatistics, rounded: Callable[[Array], Array]
) -> Array:
    """Finds factors [in] on the inputs' weights with which rounding changes the product least.

    Candidates are mean|x|^r and mean|x|^r / mean|w|^(1 - r), for r on a grid in [0, 1], normalised
    so that the geometric mean of the largest and the smallest factor is 1; and all factors 1.

    Args:
      rounded: rounds a weight [out, in] to the format, and returns it in float32.
    """
    wide = weight.astype(jnp.float32)
    activation = jnp.maximum(inputs.mean, 1e-6)
    magnitude = jnp.mean(jnp.abs(wide), axis=0)
    ratio = jnp.arange(_RATIOS)[:, None] / _RATIOS
    plain = activation**ratio
    scales = jnp.concatenate([plain, plain / (magnitude ** (1 - ratio) + 1e-4)])
    scales = jnp.maximum(scales, 1e-4)
    extremes = jnp.max(scales, axis=1, keepdims=True) * jnp.min(scales, axis=1, keepdims=True)
    scales = scales / jnp.sqrt(extremes)

    def error(scale: Array) -> Array:
        return output_error(rounded(wide * scale) / scale - wide, inputs.moment)

    return scales[jnp.argmin(jax.lax.map(error, scales))]


def quantize_int4_clipped(weight: Array, moment: Array, group: int = 128) -> Int4Weight:
    """Symmetric 4-bit rounding, with each group's scale shrunk to minimise the error of the
    product.

    weight is [out, in], moment [in, in]. The scales tried are 0.5 to 1 times that of
    `quantize_int4`. Each group is judged by itself, without correlations between groups.
    """
    out, depth = weight.shape
    count = depth // group
    wide = weight.astype(jnp.float32).reshape(out, count, group)
    blocks = moment.reshape(count, group, count, group)
    blocks = jnp.stack([blocks[index, :, index] for index in range(count)])
    largest = jnp.argmax(jnp.abs(wide), axis=-1, keepdims=True)
    full = jnp.take_along_axis(wide, largest, axis=-1) / -8.0

    def codes_of(scale: Array) -> Array:
        inverse = jnp.where(scale == 0, 0.0, 1.0 / scale)
        return jnp.clip(jnp.round(wide * inverse) + 8.0, 0.0, 15.0)

    def error(shrink: Array) -> Array:
        scale = full * shrink
        difference = (codes_of(scale) - 8.0) * scale - wide
        with jax.default_matmul_precision("highest"):
            return jnp.einsum("ogi,gij,ogj->og", difference, blocks, difference)

    shrinks = jnp.linspace(1.0, 0.5, _SHRINKS)
    best = shrinks[jnp.argmin(jax.lax.map(error, shrinks), axis=0)]
    scale = full * best[..., None]
    return pack_int4(codes_of(scale).reshape(weight.shape), scale[..., 0])
