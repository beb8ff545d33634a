"""Which of those who wait to serve, when not all of them can be in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduler.sequence import Sequence


class Job(NamedTuple):
    """A sequence that waits."""

    due: float
    """The latest time of its first token, by what is expected of it."""
    lost: float
    """The latest time of its admission, at the best."""
    prefill: int
    """Prompt tokens to compute."""
    decode: float
    """Seconds of decode steps, times its share of what a step has room for."""
    droppable: bool
    """It has a deadline, and is of no use after it."""
    seq: Sequence


class Capacity(NamedTuple):
    """What is done of waiting jobs per second."""

    prefill: float
    decode: float


def in_time(jobs: Iterable[Job], now: float, capacity: Capacity) -> list[bool]:
    """Which of the jobs, given by `due`, to do so that as many as possible are in time.

    Moore (1968), with Hodgson's rule: go through them in order of due dates, and whenever one
    would be late give up the one with most work of those so far. That is optimal for work of one
    kind. Here there are two, the prefill that must be done by the due date and the decode steps
    of those before, each done one job after the other: the kind that makes a job late decides who
    has most. Jobs that are not `droppable` are kept, late or not.
    """
    listed = list(jobs)
    kept = [now <= job.due or not job.droppable for job in listed]
    waits = (_Wait(capacity.prefill), _Wait(capacity.decode))
    for index, job in enumerate(listed):
        if not kept[index]:
            continue  # late whatever else is given up
        for wait, work in zip(waits, (job.prefill, job.decode), strict=True):
            wait.add(work, index if job.droppable else None)
        for wait, work in zip(waits, (0.0, job.decode), strict=True):
            if job.droppable and kept[index] and now + wait.seconds(work) > job.due:
                dropped = wait.largest(kept)
                kept[dropped] = False
                waits[0].total -= listed[dropped].prefill
                waits[1].total -= listed[dropped].decode
    return kept


class _Wait:
    """One kind of work: of all jobs that are kept so far."""

    def __init__(self, pace: float):
        self.total = 0.0
        self._pace = pace
        self._heap: list[tuple[float, int]] = []

    def add(self, work: float, droppable: int | None) -> None:
        self.total += work
        if droppable is not None:
            heapq.heappush(self._heap, (-work, -droppable))

    def seconds(self, rest: float) -> float:
        """Until all is done but `rest`."""
        return (self.total - rest) / self._pace

    def largest(self, kept: list[bool]) -> int:
        """Who has most of this work, of equals the last; not asked for again."""
        while True:
            index = -heapq.heappop(self._heap)[1]
            if kept[index]:
                return index
