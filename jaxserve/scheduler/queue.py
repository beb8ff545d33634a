"""The waiting queue: in order of arrival, or by priority with ageing."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api import DeadlineMissed
from jaxserve.scheduler.sequence import Sequence

AGEING = 30.0
"""Seconds of waiting that equal one level of priority."""

MAX_LEVEL = 20
"""Priorities are clamped to plus and minus this. So a client that sets priorities can delay others
by at most 2 * 20 * 30 s = 20 minutes."""


class Shed(NamedTuple):
    """A sequence removed from the queue because its deadline cannot be met."""

    seq: Sequence
    error: DeadlineMissed


class WaitingQueue:
    """Sequences in order of rank. A preempted sequence keeps its rank.

    One level of priority equals `AGEING` seconds of waiting. All sequences age at the same rate, so
    the order never changes and no sequence starves. Without priorities it is the order of arrival.
    """

    @property
    def next_review(self) -> float:
        """When to call `review`, on the scheduler's clock. The order may change by then."""
        return math.inf

    def __init__(self) -> None:
        self._order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates in order of rank."""
        return iter(self._order)

    def join(self, seq: Sequence, now: float) -> None:
        """Adds a new sequence and sets its rank."""
        level = max(-MAX_LEVEL, min(seq.level, MAX_LEVEL))
        seq.rank = seq.arrived + AGEING * level, seq.id
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        """Adds a sequence that has a rank, for instance after a preemption."""
        insort(self._order, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self._order, seq.rank, key=_rank)
        assert self._order[place] is seq
        del self._order[place]

    def first(self) -> Sequence | None:
        """Returns the sequence to admit next, or None."""
        return self._order[0] if self._order else None

    def upcoming(self) -> Iterator[Sequence]:
        """Iterates in the expected order of admission."""
        return iter(self._order)

    def admit(self, seq: Sequence, now: float) -> None:
        """Removes the first sequence, which starts to run."""
        self.remove(seq)

    def ended(self, seq: Sequence) -> None:
        """Reports that a sequence has ended."""

    def review(self, now: float, steps: int, prefill_rate: float | None) -> list[Shed]:
        """Reorders the queue and removes the sequences whose deadlines cannot be met.

        Args:
          now: seconds on the scheduler's clock.
          steps: steps computed since the start.
          prefill_rate: prompt tokens per second beside the running decodes, if known.
        """
        return []


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank
