"""Prometheus metrics that are cheap to observe and to scrape. A scrape formats only values that
have changed since the previous scrape.

The client library formats every sample at every scrape. That takes 8 ms for 80 KB, and several
times as long beside a busy engine. Routers scrape 20 times a second.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PROCESS_SECONDS = 1.0
"""Maximum age of the process metrics. Counting open files takes up to 1 ms."""

type Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name."""


class Value(Protocol):
    """The value of a metric family for one set of labels."""

    version: int
    """Differs after each change."""

    def lines(self, name: str, labels: Labels) -> Callable[[], str]:
        """Returns a function that formats the current value as lines of text."""
        ...


class Number:
    """A counter or a gauge. Thread-safe."""

    def __init__(self) -> None:
        self.version = 0
        self.value = 0.0
        self._lock = threading.Lock()

    def inc(self, amount: float = 1.0) -> None:
        """Adds to the value."""
        with self._lock:
            self.value += amount
            self.version += 1

    def set(self, value: float) -> None:
        """Replaces the value."""
        if value != self.value:
            with self._lock:
                self.value = value
                self.version += 1

    def lines(self, name: str, labels: Labels) -> Callable[[], str]:
        """See `Value`."""
        head = f"{name}{_braces(labels)} "
        return lambda: f"{head}{_text(self.value)}\n"


class Histogram:
    """Counts of values by upper bound. Thread-safe."""

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: increasing, without infinity."""
        self.version = 0
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, count: int = 1) -> None:
        """Counts the same value `count` times."""
        place = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[place] += count
            self._sum += value * count
            self.version += 1

    def state(self) -> tuple[list[int], float]:
        """Returns the number of values up to each bound, infinity included, and the sum of
        values."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum

    def lines(self, name: str, labels: Labels) -> Callable[[], str]:
        """See `Value`."""
        bounds = [_text(bound) for bound in (*self.bounds, math.inf)]
        le = [_braces(tuple(sorted((*labels, ("le", bound))))) for bound in bounds]
        heads = [f"{name}_bucket{each} " for each in le]
        heads += [f"{name}_count{_braces(labels)} ", f"{name}_sum{_braces(labels)} "]

        def formatted() -> str:
            counts, total = self.state()
            numbers = [*map(_text, (*counts, counts[-1])), _text(total)]
            return "".join([f"{head}{n}\n" for head, n in zip(heads, numbers, strict=True)])

        return formatted


class TokenHistogram(Histogram):
    """A histogram without a lock, for values observed at every token. One thread observes; any
    thread may read."""

    def observe(self, value: float, count: int = 1) -> None:
        """Counts the same value `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count
        self.version += 1


class Family[V: Value]:
    """All values of one metric name and kind, by labels."""

    def __init__(
        self, name: str, kind: str, text: str, labels: Sequence[str], new: Callable[[], V]
    ):
        """`new`: makes the value when a set of labels first appears."""
        self.name, self.kind = name, kind
        self._head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        self._names, self._new = sorted(labels), new
        self._lock = threading.Lock()
        self.values: dict[Labels, V] = {}
        self._formats: dict[Labels, Callable[[], str]] = {}
        self._formatted: dict[Labels, tuple[int, str]] = {}

    def labels(self, **labels: str) -> V:
        """Returns the value for these labels."""
        key = tuple([(name, labels[name]) for name in self._names])
        if (value := self.values.get(key)) is None:
            with self._lock:
                value = self.values.setdefault(key, self._new())
        return value

    def under(self, name: str) -> Family[V]:
        """Returns a family with the same values and help text under another name."""
        second = Family(name, self.kind, self.name, self._names, self._new)
        second.values = self.values
        return second

    def exposition(self) -> str:
        """Returns the family as text."""
        return self._head + "".join(list(map(self._of, tuple(self.values.items()))))

    def _of(self, item: tuple[Labels, V]) -> str:
        labels, value = item
        version = value.version  # read first: a change meanwhile is formatted in the next scrape
        found, text = self._formatted.get(labels, (None, ""))
        if found != version:
            if (format_now := self._formats.get(labels)) is None:
                format_now = self._formats[labels] = value.lines(self.name, labels)
            text = format_now()
            self._formatted[labels] = version, text
        return text


class Registry:
    """The metric families of a server, in order of creation."""

    def __init__(self) -> None:
        self._families: dict[str, Family[Number] | Family[Histogram]] = {}
        self._of_series: dict[str, str] = {}
        """Family names by series name and by family name."""
        self._process = _Process()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Number]:
        """Adds a counter. Its series is the name with `_total`."""
        family = Family(f"{name}_total", "counter", text, labels, Number)
        self._add(family)
        return family

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Number]:
        family = Family(name, "gauge", text, labels, Number)
        self._add(family)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        kind: type[Histogram] = Histogram,
    ) -> Family[Histogram]:
        """Adds a histogram. `bounds`: increasing, without infinity."""
        family = Family(name, "histogram", text, labels, lambda: kind(bounds))
        self._add(family)
        return family

    def also(self, former: str, name: str) -> None:
        """Also exports the family `name` under a former name."""
        self._add(self._families[name].under(former))

    def exposition(self, names: Collection[str] | None = None) -> bytes:
        """Returns families as text of type CONTENT_TYPE: all of them, or those with one of these
        family or series names."""
        if names is None:
            return "".join([self._process.text(), *self._texts(self._families)]).encode()
        families = {self._of_series[name] for name in names if name in self._of_series}
        return "".join(self._texts(sorted(families))).encode()

    def _texts(self, names: Iterable[str]) -> Iterator[str]:
        return (self._families[name].exposition() for name in tuple(names))

    def _add(self, family: Family[Number] | Family[Histogram]) -> None:
        if family.name in self._families:
            raise ValueError(f"the metric {family.name} exists already")
        self._families[family.name] = family
        for part in ("", "_bucket", "_count", "_sum"):
            self._of_series[f"{family.name}{part}"] = family.name


class _Process:
    """Metrics of the process, read from the system at most once per PROCESS_SECONDS."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._said, self._at = "", -math.inf

    def text(self) -> str:
        if (now := time.monotonic()) - self._at >= PROCESS_SECONDS:
            self._said, self._at = generate_latest(self._registry).decode(), now
        return self._said


def _braces(labels: Labels) -> str:
    pairs = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _text(number: float) -> str:
    """Formats a number like the Go client."""
    if type(number) is int and 0 <= number < 1_000_000:
        return f"{number}.0"
    return floatToGoString(number)
