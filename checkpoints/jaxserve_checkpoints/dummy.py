"""Seeded random weights, made on the device, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_checkpoints.load import Encode, Filling, as_stored
from jaxserve_checkpoints.naming import leaf_parts

_NORM_NOISE = 0.02


def dummy_params[Tree](abstract: Tree, seed: int, encode: Encode = as_stored) -> Tree:
    """Returns the tree of `abstract` (floating-point ShapeDtypeStructs) with random arrays, each
    put through `encode`.

    Each leaf, or layer of a stacked leaf, depends only on `seed` and its path. Vectors whose names
    end in "bias" are 0.02 N(0, 1); other vectors are norm weights, 1 + 0.02 N(0, 1). Matrices [...,
    out, in] are N(0, 1/in), so that activations have the same size in all layers. Compiles once per
    distinct shape and dtype.
    """
    filling = Filling(abstract, encode)
    for part in leaf_parts(abstract):
        mean = 0.0 if part.path.endswith("bias") else 1.0
        make = _maker(tuple(part.leaf.shape), np.dtype(part.leaf.dtype), part.leaf.sharding, mean)
        filling.put(part, make(np.uint32(seed), np.uint32(zlib.crc32(part.path.encode()))))
    return filling.tree()


@functools.cache
def _maker(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any, mean: float
) -> Callable[[np.uint32, np.uint32], jax.Array]:
    """Returns a compiled function (seed, hash of the path) -> weights. `mean`: mean of vectors."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dummy weights are floating point, got {dtype} {list(shape)}")

    def make(seed: jax.Array, leaf: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), leaf)
        noise = jax.random.normal(key, shape, jnp.float32)
        if len(shape) < 2:
            return (mean + _NORM_NOISE * noise).astype(dtype)
        return (noise * shape[-1] ** -0.5).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
