"""Deadline scheduling: chooses which waiting requests to serve if not all can be in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduler.sequence import Sequence


class Job(NamedTuple):
    """A waiting sequence and its expected work."""

    due: float
    """The latest useful time of its first token, given its expected output length."""
    lost: float
    """The latest admission that could still meet the deadline in the best case."""
    prefill: int
    """Prompt tokens to compute."""
    decode: float
    """Seconds of its decode steps, times its share of a step's capacity."""
    span: float
    """Seconds from the first output token to the last."""
    droppable: bool
    """Whether it has a deadline after which its answer is useless."""
    seq: Sequence


class Capacity(NamedTuple):
    """Work on waiting jobs that the engine does per second."""

    prefill: float
    decode: float


def in_time(jobs: Iterable[Job], now: float, capacity: Capacity) -> list[bool]:
    """Returns which jobs to keep so that as many as possible meet their deadlines.

    The Moore-Hodgson rule (Moore 1968): take the jobs in order of due date; whenever one would be
    late, drop the largest job so far. The rule is optimal for one kind of work. Here there are two
    kinds: the prefill that must be done by the due date, and the decode steps of earlier jobs. The
    kind that makes a job late decides which job is the largest. Jobs that are not `droppable` stay.

    Args:
      jobs: in order of `due`.
      now: seconds on the scheduler's clock.
    """
    listed = list(jobs)
    kept = [now <= job.due or not job.droppable for job in listed]
    prefill, decode = (_Wait(capacity.prefill), _Wait(capacity.decode))
    for index, job in enumerate(listed):
        if not kept[index]:
            continue  # late whichever jobs are dropped
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
    """Returns whether every `droppable` job meets its deadline if they run in this order."""
    prefill = decode = 0.0
    for job in jobs:
        prefill += job.prefill
        latest = max(prefill / capacity.prefill, decode / capacity.decode)
        if job.droppable and now + latest > job.due:
            return False
        decode += job.decode
    return True


class _Wait:
    """One kind of work, summed over the jobs kept so far."""

    def __init__(self, pace: float):
        self.total = 0.0
        self._pace = pace
        self._heap: list[tuple[float, int]] = []
        self._new: list[tuple[float, int]] = []
        """Jobs not yet in the heap, because most calls never ask for the largest."""

    def add(self, work: float, droppable: int | None) -> None:
        self.total += work
        if droppable is not None:
            self._new.append((-work, -droppable))

    def seconds(self, rest: float) -> float:
        """Returns the seconds until all work except `rest` is done."""
        return (self.total - rest) / self._pace

    def largest(self, kept: list[bool]) -> int:
        """Removes and returns the kept job with the most of this work; among equals, the last."""
        for entry in self._new:
            heapq.heappush(self._heap, entry)
        self._new.clear()
        while True:
            index = -heapq.heappop(self._heap)[1]
            if kept[index]:
                return index
