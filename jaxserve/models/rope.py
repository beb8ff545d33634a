"""Rotary position embedding: the angles."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.model_spec import ModelSpec, YarnScaling


def rope_tables(spec: ModelSpec, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines of the rotations at `positions` [tokens]: float32 [tokens, head_dim/2].

    YaRN's attention factor is folded in, as in transformers' Qwen3.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope_frequencies(spec))
    scale = spec.rope_scaling.score_scale if spec.rope_scaling else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_frequencies(spec: ModelSpec) -> np.ndarray:
    """Angle per position of each rotated pair: float32 [head_dim/2]."""
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies = spec.rope_theta**-exponent
    if spec.rope_scaling is not None:
        frequencies = _yarn(frequencies, spec.rope_scaling, spec.head_dim, spec.rope_theta)
    return frequencies.astype(np.float32)


def _yarn(frequencies: np.ndarray, yarn: YarnScaling, dim: int, theta: float) -> np.ndarray:
    """Interpolate slow rotations by `factor`, keep fast ones, blend between (arXiv 2309.00071)."""

    def pair_with(rotations: float) -> float:
        """Index of the pair that turns `rotations` times over the original context."""
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 1e-3)
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return frequencies * (1 - slow) + frequencies / yarn.factor * slow
