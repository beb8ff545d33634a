"""When requests are meant to be sent: a schedule made before the run, so that nothing delays it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """A rate that goes in a straight line from `start` to `end` requests/s over `seconds`."""

    seconds: float
    start: float
    end: float

    @property
    def requests(self) -> float:
        """Expected number of arrivals: the area under the line."""
        return self.seconds * (self.start + self.end) / 2

    def when(self, requests: float) -> float:
        """Seconds into the segment at which that many requests are expected to have arrived."""
        slope = (self.end - self.start) / self.seconds
        if slope == 0:
            return requests / self.start
        return (math.sqrt(self.start**2 + 2 * slope * requests) - self.start) / slope


def constant_rate(rate: float, seconds: float) -> list[Segment]:
    """Requests per second that stay the same for so many seconds."""
    return [Segment(seconds, rate, rate)]


def ramp(start: float, end: float, seconds: float) -> list[Segment]:
    """Requests per second that go from one rate to another in a line."""
    return [Segment(seconds, start, end)]


def steps(rates: Sequence[float], seconds: float) -> list[Segment]:
    """Each rate for an equal part of the time."""
    return [Segment(seconds / len(rates), rate, rate) for rate in rates]


def schedule(segments: Sequence[Segment], *, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds from the start of the run.

    A renewal process of unit rate is stretched by the expected number of arrivals, so the rate may
    change while the gaps keep their kind.

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
    """Arrivals with gaps of mean 1; evenly spaced ones begin half a gap in."""
    if math.isinf(burstiness):
        count = 0
        while True:
            yield count + 0.5
            count += 1
    now = 0.0
    while True:
        now += float(rng.gamma(burstiness, 1 / burstiness))
        yield now
