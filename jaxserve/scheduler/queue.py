"""Who waits, and who is next: the scheduling policies."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api import DeadlineMissed, Request
from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.sequence import Sequence

AGEING = 30.0
"""Seconds of waiting that are worth one level of priority."""

_PACE_SECONDS = 10.0
"""Time after which an admission counts for 1/e in the measured pace."""

_PACE_LEAST = 1.0
"""Seconds of a queue before its pace is believed."""


_MOST_TENANTS = 10_000
"""Clients make up their keys as they like; those that are away are forgotten beyond this."""


class Shed(NamedTuple):
    """A sequence that left the queue because its deadline cannot be met."""

    seq: Sequence
    error: DeadlineMissed


class _Pace:
    """Prompt tokens per second that are admitted while there is a queue."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._mark: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > _PACE_LEAST else None

    def begin(self, now: float) -> None:
        """There is a queue again; the time without one does not count."""
        self._mark = now

    def admitted(self, tokens: int, now: float) -> None:
        elapsed = now - self._mark if self._mark is not None else 0.0
        kept = math.exp(-elapsed / _PACE_SECONDS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed
        self._mark = now


class WaitingQueue:
    """Sequences in the order of the policy; preempted ones keep the rank that they came with.

    - fcfs: in order of arrival.
    - priority: a level of `Request.priority` counts as `AGEING` seconds of waiting. All age at one
      pace, so the order never changes and nobody starves.
    - slo: the tenant that got least comes first, and of a tenant's sequences the one with the
      highest response ratio: time waited over prompt tokens that are not cached. Equal prompts
      leave in order of arrival, short ones early, and whoever waits long enough is first. Who
      cannot have its first token before its deadline is taken out (`shed`, `check_deadline`).
    """

    def __init__(self, config: SchedulerConfig, prefill_rate: float | None):
        """`prefill_rate`: prompt tokens per second that the device can compute, if known."""
        self._policy = config.policy
        self._rate = prefill_rate
        self._order: list[Sequence] = []
        self._served: dict[str, float] = {}
        """Tokens that each tenant was admitted with; of all that ever came."""
        self._pace = _Pace()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of rank."""
        return iter(self._order)

    def rank(self, request: Request, number: int, now: float) -> tuple[float, int]:
        """Of a new sequence."""
        if self._policy == "priority":
            return now + AGEING * request.priority, number
        return 0.0, number

    def push(self, seq: Sequence) -> None:
        if self._policy == "slo":
            self._catch_up(seq.tenant)
            if not self._order:
                self._pace.begin(seq.arrived)
        insort(self._order, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        self._order.remove(seq)

    def first(self, now: float) -> Sequence | None:
        """Who is to be admitted next."""
        if not self._order or self._policy != "slo":
            return self._order[0] if self._order else None
        for seq in self._order:
            if seq.admitted >= 0:
                return seq  # it was preempted, its client has tokens already
        tenants = {seq.tenant for seq in self._order}
        tenant = min(tenants, key=lambda name: (self._served[name], name))
        waiting = (seq for seq in self._order if seq.tenant == tenant)
        return max(waiting, key=lambda seq: ((now - seq.arrived) / seq.uncached, -seq.id))

    def admitted(self, seq: Sequence, now: float, expected: int) -> None:
        """It was taken out to run and is expected to generate so many tokens."""
        self._order.remove(seq)
        if self._policy != "slo":
            return
        self._served[seq.tenant] += seq.uncached + expected
        self._pace.admitted(seq.uncached, now)

    def check_deadline(self, seq: Sequence, now: float) -> None:
        """DeadlineMissed if a new sequence would, at the pace of late, wait beyond its deadline."""
        rate = self._pace.tokens_per_second or self._rate
        if self._policy != "slo" or seq.deadline is None or not rate:
            return
        slack = seq.deadline - now
        ratio = slack / seq.uncached
        ahead = sum(
            other.uncached
            for other in self._order
            if (now + slack - other.arrived) / other.uncached >= ratio
        )
        wait = ahead / rate
        if ahead and wait > slack:
            raise DeadlineMissed(
                f"the first token would take about {wait:.1f} s, the deadline is in {slack:.1f} s",
                retry_after=max(1.0, wait - slack),
            )

    def shed(self, now: float) -> list[Shed]:
        """Take out who would miss its deadline even if it were admitted at once."""
        if self._policy != "slo":
            return []
        late = [seq for seq in self._order if self._is_late(seq, now)]
        for seq in late:
            self._order.remove(seq)
        rate = self._pace.tokens_per_second or self._rate
        left = sum(seq.uncached for seq in self._order)
        again = max(1.0, left / rate if rate else 0.0)
        text = "its deadline cannot be met any more"
        return [Shed(seq, DeadlineMissed(text, retry_after=again)) for seq in late]

    def _is_late(self, seq: Sequence, now: float) -> bool:
        if seq.deadline is None or seq.admitted >= 0:
            return False
        return now + (seq.uncached / self._rate if self._rate else 0.0) > seq.deadline

    def _catch_up(self, tenant: str) -> None:
        """Who was away does not come back with a claim on all that the others got meanwhile."""
        present = {seq.tenant for seq in self._order}
        if len(self._served) > _MOST_TENANTS:
            self._served = {name: self._served[name] for name in present}
        waiting = [self._served[name] for name in present]
        least = min(waiting, default=max(self._served.values(), default=0.0))
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank
