"""Bounds the average rate of loads while other sequences run: loads take turns to begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.scheduler.sequence import Sequence


class Asked(NamedTuple):
    """A sequence that waits for a load which has not begun."""

    seq: Sequence
    prefill_rate: float | None
    """Tokens per second that a prefill would compute instead; None: unknown."""
    keys: frozenset[bytes] = frozenset()
    """Keys of the pages to load. Empty if the sequence joins a load in flight."""
    size: int = 0
    """Bytes that its load adds to those before it. 0 if the sequence joins another load."""
    held: float | None = None
    """Time since which the load waits for its turn; None: it does not wait."""


class LoadPace:
    """The sequences whose loads have not begun, in order, and the time at which the next may begin.

    A load runs at full speed. After a load of B bytes has begun, the next begins B / `rate` seconds
    later. So loads take at most `rate` bytes per second on average, and one load more. If no other
    sequence runs, a load delays nobody and begins at once.
    """

    def __init__(
        self, rate: float | None, *, clock: Callable[[], float], others_run: Callable[[], bool]
    ):
        """
        Args:
          rate: bytes per second; None: no bound.
          clock: returns seconds.
          others_run: returns whether sequences run, which loads would delay. A sequence that waits
            for a load does not run.
        """
        self.rate = rate
        self._clock, self._others_run = clock, others_run
        self._asked: dict[Sequence, Asked] = {}
        self._next = -math.inf
        """Time at which the next load may begin."""

    def __len__(self) -> int:
        return len(self._asked)

    def is_open(self, now: float) -> bool:
        """Returns whether a load may begin at time `now`."""
        return self.rate is None or now >= self._next or not self._others_run()

    def began(self, now: float, size: int) -> None:
        """Reports that a load of `size` bytes began at time `now`.

        Loads that began together while nobody ran do not add up. Otherwise one client alone would
        let those that come later wait for all its loads so far.
        """
        if self.rate is not None:
            self._next = max(self._next, now + size / self.rate)

    def ask(self, asked: Asked) -> None:
        """Adds a sequence behind the others. A sequence whose pages another one waits for will join
        that one's load."""
        size = 0 if self._shares(asked.keys) else asked.size
        self._asked[asked.seq] = asked._replace(size=size)

    def hold(self, asked: Asked, now: float) -> None:
        """Returns a sequence of `take` whose turn has not come at time `now`."""
        held = now if asked.held is None else asked.held
        self._asked[asked.seq] = asked._replace(held=held)

    def take(self) -> list[Asked]:
        """Removes and returns all sequences, in order."""
        asked, self._asked = list(self._asked.values()), {}
        return asked

    def drop(self, seq: Sequence) -> None:
        """Removes a sequence, if it is there."""
        self._asked.pop(seq, None)

    def seconds(self, keys: frozenset[bytes]) -> float:
        """Returns the predicted seconds until a load of these pages may begin: on its own, behind
        all others, or with one that brings some of the pages."""
        if self.rate is None or not self._others_run():
            return 0.0
        ahead = 0
        for each in self._asked.values():
            if not keys.isdisjoint(each.keys):
                break
            ahead += each.size
        return max(self._next - self._clock(), 0.0) + ahead / self.rate

    def _shares(self, keys: frozenset[bytes]) -> bool:
        return any(not keys.isdisjoint(each.keys) for each in self._asked.values())
