"""How far predictions of the next token move when something in a model becomes coarser."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray


def compare(plain: NDArray[np.floating], other: NDArray[np.floating]) -> NDArray[np.float64]:
    """Sums over positions: their number, KL divergences of `other` from `plain` in nats, other
    first choices, changes of the likeliest token's log-probability.

    Both are log-probabilities [positions, vocabulary] after the same text (teacher-forced).
    """
    best = plain.argmax(-1)
    rows = np.arange(len(plain))
    return np.array(
        [
            len(plain),
            (np.exp(plain) * (plain - other)).sum(dtype=np.float64),
            (other.argmax(-1) != best).sum(),
            np.abs(plain[rows, best] - other[rows, best]).sum(dtype=np.float64),
        ]
    )


@jax.jit
def compare_where(plain: Array, other: Array, counted: Array) -> Array:
    """`compare` of the positions that are `counted`, bool [positions], on the device."""
    best = plain.argmax(-1)[:, None]
    change = jnp.take_along_axis(plain - other, best, axis=-1)[:, 0]
    sums = [
        jnp.ones_like(change),
        (jnp.exp(plain) * (plain - other)).sum(-1),
        (other.argmax(-1) != best[:, 0]).astype(change.dtype),
        jnp.abs(change),
    ]
    return jnp.where(counted, jnp.stack(sums), 0).sum(-1)


def describe(sums: NDArray[np.float64]) -> dict[str, float]:
    """Means over the positions of sums of `compare`."""
    count, divergence, flips, change = map(float, sums)
    return {
        "positions": int(count),
        "mean KL, nats": divergence / count,
        "other first choice": flips / count,
        "mean change of the likeliest's logprob": change / count,
    }
