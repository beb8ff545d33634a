"""Who waits, and who is next: in order of arrival, or by priority with ageing."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api import DeadlineMissed
from jaxserve.scheduler.sequence import Sequence

AGEING = 30.0
"""Seconds of waiting that are worth one level of priority."""

MOST_LEVEL = 20
"""What is above counts as this, what is below its negative as that: whoever may set priorities can
keep others waiting for twenty minutes longer than otherwise, and not for ever."""


class Shed(NamedTuple):
    """A sequence that left the queue because its deadline cannot be met."""

    seq: Sequence
    error: DeadlineMissed


class WaitingQueue:
    """Sequences by rank; preempted ones keep the rank that they came with.

    A level of priority counts as `AGEING` seconds of waiting. All age at one pace, so the order
    never changes and nobody starves; and without levels it is the order of arrival.
    """

    @property
    def next_review(self) -> float:
        """When the order may change although nobody comes or leaves."""
        return math.inf

    def __init__(self) -> None:
        self._order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of rank."""
        return iter(self._order)

    def join(self, seq: Sequence, now: float) -> None:
        """A new sequence."""
        level = max(-MOST_LEVEL, min(seq.level, MOST_LEVEL))
        seq.rank = seq.arrived + AGEING * level, seq.id
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        """One that has a rank: it comes, or was preempted and comes back."""
        insort(self._order, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self._order, seq.rank, key=_rank)
        assert self._order[place] is seq
        del self._order[place]

    def first(self) -> Sequence | None:
        """Who is to be admitted next."""
        return self._order[0] if self._order else None

    def upcoming(self) -> Iterator[Sequence]:
        """In the order in which they will be first, as far as it is known."""
        return iter(self._order)

    def admit(self, seq: Sequence, now: float) -> None:
        """The first is taken out to run."""
        self.remove(seq)

    def ended(self, seq: Sequence) -> None:
        """One that ran is over."""

    def review(self, now: float, steps: int, prefill_rate: float | None) -> list[Shed]:
        """Decide anew who is next, and take out those for whom it is too late.

        Args:
          steps: computed since the start.
          prefill_rate: prompt tokens per second that are computed beside those who run, if known.
        """
        return []


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank
