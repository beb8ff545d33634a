"""Records the phases of start-up: when they began and how long they took."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_TELLING = 0.1
"""Share of a phase that must be done before its pace predicts the rest."""

_WIDTH = 40
"""Width of the bar chart in characters."""


class Span(NamedTuple):
    """One phase, in seconds since the process began."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return self.end - self.start


class Timeline:
    """Phases of a start, which may overlap. Every method is thread-safe."""

    def __init__(self) -> None:
        self._origin = time.monotonic() - _process_age()
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def now(self) -> float:
        """Returns the seconds since the process began."""
        return time.monotonic() - self._origin

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Records the body of a `with` statement as a phase."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, self.now())

    def add(self, name: str, start: float, end: float) -> None:
        with self._lock:
            self._spans.append(Span(name, start, end))

    def spans(self) -> list[Span]:
        """All finished phases by start time."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start, -span.end))

    def summary(self) -> str:
        """Returns one line for the log."""
        return ", ".join(f"{span.name} {span.seconds:.2f} s" for span in self.spans())


class Pace:
    """Predicts how long the rest of a phase takes."""

    def __init__(self) -> None:
        self._phase = ""
        self._begun = self._moved = 0.0
        self._done = 0.0

    def describe(self, phase: str, done: float, now: float) -> str:
        """Returns one line for the log. Call it often, so that it sees when progress happens.

        Args:
          phase: name of the phase.
          done: the finished share, 0 to 1.
          now: seconds of any clock.
        """
        if phase != self._phase:
            self._phase, self._begun, self._done = phase, now, 0.0
        if done > self._done:
            self._done, self._moved = done, now
        line = f"{phase}, {100 * done:.0f} % done"
        if not _TELLING <= done < 1.0:
            return line
        left = (self._moved - self._begun) / done - (now - self._begun)
        return f"{line}, about {max(left, 1):.0f} s left"


def show(timeline: Timeline) -> str:
    """Returns the phases as a table with bars, for a terminal."""
    spans = timeline.spans()
    total = max((span.end for span in spans), default=0.0) or 1.0
    widest = max((len(span.name) for span in spans), default=0)
    lines = [f"{'phase':<{widest}}  {'from':>7}  {'took':>7}"]
    for span in spans:
        before = round(span.start / total * _WIDTH)
        length = max(1, round(span.end / total * _WIDTH) - before)
        bar = " " * before + "█" * length
        lines.append(f"{span.name:<{widest}}  {span.start:6.2f}s  {span.seconds:6.2f}s  {bar}")
    return "\n".join(lines)


def _process_age() -> float:
    """Returns the seconds since the kernel created this process; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): after boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
