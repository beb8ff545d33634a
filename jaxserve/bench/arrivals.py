"""Schedules of send times. They are made before the run, so that nothing delays them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """A rate that changes linearly from `start` to `end` requests/s over `seconds`."""

    seconds: float
    start: float
    end: float

    @property
    def requests(self) -> float:
        """Expected number of arrivals: the area under the line."""
        return self.seconds * (self.start + self.end) / 2

    def when(self, requests: float) -> float:
        """Returns the time in the segment at which `requests` arrivals are expected, in seconds."""
        slope = (self.end - self.start) / self.seconds
        if slope == 0:
            return requests / self.start
        return (math.sqrt(self.start**2 + 2 * slope * requests) - self.start) / slope


def constant_rate(rate: float, seconds: float) -> list[Segment]:
    """Returns a constant rate in requests per second."""
    return [Segment(seconds, rate, rate)]


def ramp(start: float, end: float, seconds: float) -> list[Segment]:
    """Returns a rate that changes linearly, in requests per second."""
    return [Segment(seconds, start, end)]


def steps(rates: Sequence[float], seconds: float) -> list[Segment]:
    """Returns the rates one after another, each for an equal part of the time."""
    return [Segment(seconds / len(rates), rate, rate) for rate in rates]


def schedule(segments: Sequence[Segment], *, burstiness: float, seed: int) -> list[float]:
    """Returns arrival times in seconds from the start of the run.

    They are a renewal process of unit rate, stretched by the expected number of arrivals. So the
    rate may change while the distribution of the gaps stays the same.

    Args:
      burstiness: shape of the gamma-distributed gaps, as in `vllm bench serve`: 1 is Poisson,
        smaller is burstier, infinity is evenly spaced.
    """
    times: list[float] = []
    before = 0.0
    arrivals = _unit_arrivals(burstiness, np.random.default_rng(seed))
    arrival = next(arrivals)
    offset = 0.0
    for segment in segments:
        while arrival - before < segment.requests:
            times.append(offset + segment.when(arrival - before))
            arrival = next(arrivals)
        before += segment.requests
        offset += segment.seconds
    return times


def _unit_arrivals(burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Yields arrivals with gaps of mean 1. Evenly spaced ones begin half a gap in."""
    if math.isinf(burstiness):
        count = 0
        while True:
            yield count + 0.5
            count += 1
    now = 0.0
    while True:
        now += float(rng.gamma(burstiness, 1 / burstiness))
        yield now
