"""Ratios of two arms that were measured in turns, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import comb, exp, log, sqrt
from statistics import median
from typing import NamedTuple


class Ratio(NamedTuple):
    """The centre of paired ratios, with a confidence interval."""

    median: float
    low: float
    high: float
    confidence: float
    """Confidence of the interval: at least 0.95 with six pairs or more."""

    @property
    def noise(self) -> float:
        """Half the interval, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else float("inf")


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the median ratio of the second values to the first ones.

    The interval is that of order statistics, for any distribution. The true median is between the
    k-th smallest and the k-th largest ratio, unless fewer than k pairs fall on one of its sides,
    which has a binomial probability. k is the largest number with a confidence of 0.95, at least 1.
    """
    ratios = sorted(second / first for first, second in pairs)
    count, outside = len(ratios), 0.0
    k = 0
    while k < (count + 1) // 2:
        more = outside + 2 * comb(count, k) / 2**count
        if k and more > 0.05:
            break
        k, outside = k + 1, more
    return Ratio(median(ratios), ratios[k - 1], ratios[-k], 1 - outside)


def ratio_of_turns(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the central ratio of the second values to the first ones, for many short turns in
    which each arm came first equally often.

    The log ratios are then symmetric. Their centre is the median of all pairwise averages (Hodges
    and Lehmann). The 95 % interval is that of signed ranks, in normal approximation.
    """
    logs = [log(second / first) for first, second in pairs]
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    count = len(logs)
    ranks = count * (count + 1) / 4 - 1.96 * sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(int(ranks), 0)
    low, high = averages[outside], averages[-1 - outside]
    return Ratio(exp(median(averages)), exp(low), exp(high), 0.95)
