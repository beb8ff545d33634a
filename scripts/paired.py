"""Ratios of two arms that were measured in turns, and how sure their median is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import comb, exp, log, sqrt
from statistics import median
from typing import NamedTuple


class Ratio(NamedTuple):
    """The median of paired ratios, with an interval that holds the true one."""

    median: float
    low: float
    high: float
    confidence: float
    """Of the interval: at least 0.95 from six pairs on."""

    @property
    def noise(self) -> float:
        """Half the interval, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else float("inf")


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the ratio of the second values to the first ones.

    The interval is that of order statistics, whatever the distribution: between the k-th smallest
    and the k-th largest ratio lies the true median, unless fewer than k of the pairs fall on one of
    its sides, which a fair coin decides. k is the largest with a confidence of 0.95, at least 1.
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
    """Returns the ratio of the second values to the first ones, of many short turns of which each
    arm's came first equally often.

    So the log ratios are symmetric: their centre is the median of the averages of all twos (Hodges
    and Lehmann), with the interval of the signed ranks (normal approximation), which holds it in 95
    of 100 cases.
    """
    logs = [log(second / first) for first, second in pairs]
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    count = len(logs)
    ranks = count * (count + 1) / 4 - 1.96 * sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(int(ranks), 0)
    low, high = averages[outside], averages[-1 - outside]
    return Ratio(exp(median(averages)), exp(low), exp(high), 0.95)
