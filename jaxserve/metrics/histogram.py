"""A fast Prometheus histogram for values observed at every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """One histogram under several names. An observation is much cheaper than with the client
    library, which takes a lock per number. One thread observes; any may read."""

    def __init__(
        self,
        names: Sequence[str],
        text: str,
        buckets: Sequence[float],
        labels: Mapping[str, str],
        registry: CollectorRegistry,
    ):
        """`buckets`: increasing upper bounds without infinity."""
        self._names, self._text, self._labels = names, text, labels
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Observe the same value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called by the registry."""
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family
