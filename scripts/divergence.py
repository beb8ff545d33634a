"""How far predictions of the next token move when something in a model becomes coarser."""

from __future__ import annotations

import numpy as np
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


def describe(sums: NDArray[np.float64]) -> dict[str, float]:
    """Means over the positions of sums of `compare`."""
    count, divergence, flips, change = map(float, sums)
    return {
        "positions": int(count),
        "mean KL, nats": divergence / count,
        "other first choice": flips / count,
        "mean change of the likeliest's logprob": change / count,
    }
