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
    span: float
    """Seconds from its answer's first token to its last."""
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
    prefill, decode = (_Wait(capacity.prefill), _Wait(capacity.decode))
    for index, job in enumerate(listed):
        if not kept[index]:
            continue  # late whatever else is given up
        droppable = index if job.droppable else None
        prefill.add(job.prefill, droppable)
        decode.add(job.decode, droppable)
        for wait, rest in ((prefill, 0.0), (decode, job.decode)):
            if job.droppable and kept[index] and now + wait.seconds(rest) > job.due:
                dropped = wait.largest(kept)
                kept[dropped] = False
                prefill.total -= listed[dropped].prefill
                decode.total -= listed[dropped].decode
    return kept


def all_in_time(jobs: Iterable[Job], now: float, capacity: Capacity) -> bool:
    """Whether none that is `droppable` is late if the jobs are done in this order."""
    prefill = decode = 0.0
    for job in jobs:
        prefill += job.prefill
        latest = max(prefill / capacity.prefill, decode / capacity.decode)
        if job.droppable and now + latest > job.due:
            return False
        decode += job.decode
    return True


class _Wait:
    """One kind of work: of all jobs that are kept so far."""

    def __init__(self, pace: float):
        self.total = 0.0
        self._pace = pace
        self._heap: list[tuple[float, int]] = []
        self._new: list[tuple[float, int]] = []
        """Not in the heap yet: most often nobody asks for the largest."""

    def add(self, work: float, droppable: int | None) -> None:
        self.total += work
        if droppable is not None:
            self._new.append((-work, -droppable))

    def seconds(self, rest: float) -> float:
        """Until all is done but `rest`."""
        return (self.total - rest) / self._pace

    def largest(self, kept: list[bool]) -> int:
        """Who has most of this work, of equals the last; not asked for again."""
        for entry in self._new:
            heapq.heappush(self._heap, entry)
        self._new.clear()
        while True:
            index = -heapq.heappop(self._heap)[1]
            if kept[index]:
                return index
