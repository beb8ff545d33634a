"""The definition of the sum with a shared expert, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.dense_matmul.reference import sum_parts


def add_shared_expert(
    update: Array, shared: Array, scores: Array, *, column: int, dtype: DTypeLike
) -> Array:
    """The routed experts' result plus the shared expert's, times the sigmoid of its score::

        sum(update) + sum(shared) * sigmoid(sum(scores)[:, column])

    computed in float32 and rounded to `dtype` at the end, as in Qwen2-MoE.

    Args:
      update: [parts, tokens, embed], partial sums of the routed experts.
      shared: [parts, tokens, embed], partial sums of the shared expert.
      scores: [parts, tokens, columns], partial sums of the router's scores.
      column: the column of the shared expert's score.

    Returns:
      [1, tokens, embed] in `dtype`.
    """
    score = sum_parts(scores, jnp.float32)[:, column : column + 1]
    every = sum_parts(shared, jnp.float32) * jax.nn.sigmoid(score)
    return (sum_parts(update, jnp.float32) + every).astype(dtype)[None]
