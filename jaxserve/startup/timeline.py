"""When the phases of a start began and how long they took."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_TELLING = 0.1
"""Share of a phase that has to be done before its pace says how long the rest takes."""

_WIDTH = 40
"""Characters of the bar that stands for all of a start."""


class Span(NamedTuple):
    """One phase, in seconds since the process began."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Phases of a start; they may overlap. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._origin = time.monotonic() - _process_age()
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the process began."""
        return time.monotonic() - self._origin

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """The phase that the body of a `with` is."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, self.now())

    def add(self, name: str, start: float, end: float) -> None:
        with self._lock:
            self._spans.append(Span(name, start, end))

    def spans(self) -> list[Span]:
        """All phases that have ended, by their start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start, -span.end))

    def summary(self) -> str:
        """One line for the log."""
        return ", ".join(f"{span.name} {span.seconds:.2f} s" for span in self.spans())


class Pace:
    """How far a phase is, and by that how much of it is left."""

    def __init__(self) -> None:
        self._phase = ""
        self._begun = self._moved = 0.0
        self._done = 0.0

    def describe(self, phase: str, done: float, now: float) -> str:
        """One line for the log; to be called often, to see when something moves.

        Args:
          done: the share of the phase, 0 to 1.
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
    """The phases as a table with a bar for each, for a terminal."""
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
    """Seconds since the kernel made this process; 0 where it does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): after boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
