"""Rotary position embedding: tables of cosines and sines."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.layer_spec import AttentionSpec, Llama3Scaling, Rope, YarnScaling
from jaxserve.model_spec import ModelSpec


class RopeTables(NamedTuple):
    """Cosines and sines of the rotations of a step's tokens."""

    cos: Array  # float32 [tokens, rotated / 2]
    sin: Array


def step_tables(spec: ModelSpec, positions: Array) -> tuple[RopeTables, ...]:
    """Returns the distinct tables of a model's layers at `positions` [tokens]; see
    `table_of_layer`."""
    kinds = {_kind(layer.attention): layer.attention for layer in spec.layers if layer.attention}
    return tuple(rope_tables(attention, positions) for attention in kinds.values())


def table_of_layer(spec: ModelSpec, layer: int) -> int:
    """Returns the index of a layer's table in `step_tables`; 0 for a layer without attention."""
    kinds = dict.fromkeys(_kind(each.attention) for each in spec.layers if each.attention)
    own = spec.layers[layer].attention
    return 0 if own is None else list(kinds).index(_kind(own))


def _kind(attention: AttentionSpec) -> tuple[Rope, int, float]:
    return attention.rope, attention.head_dim, _factor(attention)


def rope_tables(attention: AttentionSpec, positions: Array) -> RopeTables:
    """Returns the tables of one layer at `positions` [tokens].

    The tables include factors on the scores, half of each for queries and half for keys: YaRN's
    attention factor, as in transformers, and a scale other than head_dim ** -0.5.
    """
    rotated = attention.rope.rotated(attention.head_dim)
    frequencies = rope_frequencies(attention.rope, rotated)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    factor = _factor(attention)
    # Without the barrier, XLA computes the tables again for each head of each layer.
    return lax.optimization_barrier(RopeTables(jnp.cos(angles) * factor, jnp.sin(angles) * factor))


def _factor(attention: AttentionSpec) -> float:
    """Returns the factor on rotated queries and keys. Attention itself scales by head_dim **
    -0.5."""
    scaling = attention.rope.scaling
    factor = scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0
    if attention.scale is not None:
        factor *= math.sqrt(attention.scale * math.sqrt(attention.head_dim))
    return factor


def rope_frequencies(rope: Rope, rotated: int) -> np.ndarray:
    """Returns the angle per position of each rotated pair, float32 [rotated / 2]."""
    exponent = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    frequencies = rope.theta**-exponent
    scaling = rope.scaling
    if isinstance(scaling, YarnScaling):
        frequencies = _yarn(frequencies, scaling, rotated, rope.theta)
    elif isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    elif scaling is not None:
        frequencies = frequencies / scaling.factor
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Divides slow rotations by `factor`, keeps fast ones, and blends those between."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return frequencies / scaling.factor * (1 - fast) + frequencies * fast


def _yarn(frequencies: np.ndarray, yarn: YarnScaling, dim: int, theta: float) -> np.ndarray:
    """Divides slow rotations by `factor`, keeps fast ones, blends between (arXiv 2309.00071)."""

    def pair_with(rotations: float) -> float:
        """Returns the index of the pair that turns `rotations` times over the original context."""
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 1e-3)
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return frequencies * (1 - slow) + frequencies / yarn.factor * slow
