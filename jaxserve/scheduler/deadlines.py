"""Policy slo: as many requests in time as possible, nobody starved, tenants alike."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from jaxserve.api import DeadlineMissed
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.scheduler.in_time import Capacity, Job, in_time
from jaxserve.scheduler.queue import Shed, WaitingQueue
from jaxserve.scheduler.sequence import Sequence
from jaxserve.step_times import StepTimes

STRETCH = 1000.0
"""Beside others that have deadlines, who has none is due when it has waited this many times as
long as its prefill takes."""

_REVIEW_SECONDS = 0.1
"""How old a decision about who can be in time may get."""

_STEP_SECONDS = 10.0
"""Time after which a step counts for 1/e in what steps take of late."""

_MARGIN = 0.1
"""Part of the time until a deadline that is not planned with."""

_UNKNOWN_RATE, _UNKNOWN_STEP = 10_000.0, 0.02
"""Prompt tokens per second, and seconds of a step, where no step times were measured."""

_MOST_TENANTS = 10_000
"""Clients make up their keys as they like; those that are away are forgotten beyond this."""


class _StepClock:
    """Seconds that a step takes of late, while there is a queue."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._steps, self._mark = 0, -math.inf

    def observe(self, steps: int, now: float) -> None:
        """`steps` is how many there were since the start."""
        elapsed, done = now - self._mark, steps - self._steps
        if done and elapsed < _STEP_SECONDS:
            kept = math.exp(-elapsed / _STEP_SECONDS)
            self.seconds = self.seconds * kept + (1 - kept) * elapsed / done
        self._steps, self._mark = steps, now


class _Forecast:
    """What requests will cost, by measured step times and by the lengths of earlier answers."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        times: StepTimes | None,
        lengths: OutputLengths,
    ):
        self._lengths = lengths
        self._cache_tokens, self._most_rows = cache.usable_tokens, config.max_num_seqs
        self.prefill_rate = times.prefill_rate if times else _UNKNOWN_RATE
        self._full = _UNKNOWN_STEP
        if times:
            self._full = times.of_decode(self._most_rows, self._cache_tokens)
        self.step = _StepClock(self._full)

    def job(self, seq: Sequence) -> Job:
        """Its share of the decode steps is that of the cache, or of the slots."""
        expected, deviation = self._lengths.expected(seq.most_generated, 0)
        context = seq.num_prompt + expected / 2
        share = max(context / self._cache_tokens, 1 / self._most_rows)
        prefill = seq.uncached / self.prefill_rate
        decode = expected * self.step.seconds * share
        if seq.first_by == seq.ended_by == math.inf:
            due = seq.arrived + STRETCH * prefill
            return Job(due, math.inf, seq.uncached, decode, False, seq)
        answer = (expected + deviation) * self.step.seconds
        due = min(_early(seq.arrived, seq.first_by), _early(seq.arrived, seq.ended_by) - answer)
        answer = self._lengths.short(seq.most_generated) * min(self.step.seconds, self._full)
        lost = min(seq.first_by, seq.ended_by - answer)
        return Job(due, lost - prefill, seq.uncached, decode, True, seq)


def _early(arrived: float, deadline: float) -> float:
    """Predictions err."""
    return deadline if deadline == math.inf else deadline - _MARGIN * (deadline - arrived)


class _Line:
    """Who waits of one tenant.

    By deadline, then those who cannot be in time, least work first. If nobody has a deadline, by
    response ratio: time waited over prompt tokens that are not cached.
    """

    def __init__(self) -> None:
        self._in_time: list[Job] = []
        self._rest: list[Job] = []
        """The next one is last, in both."""

    def __bool__(self) -> bool:
        return bool(self._in_time or self._rest)

    def __iter__(self) -> Iterator[Sequence]:
        for jobs in (self._in_time, self._rest):
            yield from (job.seq for job in reversed(jobs))

    @property
    def first(self) -> Sequence:
        return (self._in_time or self._rest)[-1].seq

    def arrange(self, jobs: list[Job], now: float, capacity: Capacity) -> None:
        if any(job.droppable for job in jobs):
            jobs.sort(key=lambda job: (job.due, job.seq.id))
        else:
            # As of the next review, so that who has just come has waited, too.
            then = now + _REVIEW_SECONDS
            jobs.sort(key=lambda job: ((job.seq.arrived - then) / job.prefill, job.seq.id))
        kept = in_time(jobs, now, capacity)
        chosen = zip(jobs, kept, strict=True)
        self._in_time, self._rest = [], []
        for job, keep in chosen:
            (self._in_time if keep else self._rest).append(job)
        self._in_time.reverse()
        self._rest.sort(key=lambda job: (-job.decode, -job.seq.id))

    def insert(self, job: Job) -> None:
        """Taken to be in time until all are arranged."""
        insort(self._in_time, job, key=lambda job: (-job.due, -job.seq.id))

    def remove(self, seq: Sequence) -> None:
        for jobs in (self._in_time, self._rest):
            for place in range(len(jobs) - 1, -1, -1):
                if jobs[place].seq is seq:
                    del jobs[place]
                    return
        raise AssertionError("the sequence is not in its tenant's line")


class DeadlineQueue(WaitingQueue):
    """Sequences by the latest time at which their first tokens can come and all be in time.

    - Each is due at its first token's deadline, or early enough for the whole answer before the
      answer's. One without a deadline is due when it has waited `STRETCH` times as long as its
      prefill takes; among none but such the highest response ratio is first. So short prompts go
      early, equal ones in order of arrival, and whoever waits long enough is first.
    - When not all can be in time, those with most work are put behind the others (`in_time`).
    - Who cannot be in time even if it is admitted at once is taken out.
    - The tenant that got least comes first; all this is among a tenant's own.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        times: StepTimes | None,
        lengths: OutputLengths,
    ):
        super().__init__()
        self._forecast = _Forecast(config, cache, times, lengths)
        self._served: dict[str, float] = {}
        """Seconds of decode steps that each tenant was admitted with; of all that ever came."""
        self._lines: dict[str, _Line] = {}
        """By tenant, those that have somebody."""
        self._returning: list[Sequence] = []
        """Preempted, by rank: their clients have tokens already."""
        self._reviewed = -math.inf

    @property
    def next_review(self) -> float:
        return self._reviewed + _REVIEW_SECONDS if self._order else math.inf

    def join(self, seq: Sequence, now: float) -> None:
        seq.rank = 0.0, seq.id
        self._catch_up(seq.tenant)
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        if seq.admitted >= 0:
            insort(self._returning, seq, key=lambda seq: seq.rank)
        else:
            self._lines.setdefault(seq.tenant, _Line()).insert(self._forecast.job(seq))

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        if seq.admitted >= 0:
            self._returning.remove(seq)
            return
        line = self._lines[seq.tenant]
        line.remove(seq)
        if not line:
            del self._lines[seq.tenant]

    def first(self) -> Sequence | None:
        if self._returning:
            return self._returning[0]
        return self._lines[self._tenants()[0]].first if self._lines else None

    def upcoming(self) -> Iterator[Sequence]:
        yield from self._returning
        for tenant in self._tenants():
            yield from self._lines[tenant]

    def _tenants(self) -> list[str]:
        return sorted(self._lines, key=lambda name: (self._served[name], name))

    def admit(self, seq: Sequence, now: float) -> None:
        self.remove(seq)
        if seq.admitted < 0:
            job = self._forecast.job(seq)
            self._served[seq.tenant] += job.decode + job.prefill / self._forecast.prefill_rate

    def review(self, now: float, steps: int, prefill_rate: float | None) -> list[Shed]:
        self._reviewed = now
        self._forecast.step.observe(steps, now)
        late: list[Sequence] = []
        jobs: dict[str, list[Job]] = {}
        backlog = 0.0
        for seq in self._order:
            if seq.admitted < 0:
                job = self._forecast.job(seq)
                if job.lost < now:
                    late.append(seq)
                else:
                    jobs.setdefault(seq.tenant, []).append(job)
                    backlog += job.decode
        for seq in late:
            self.remove(seq)
        share = 1 / max(len(self._lines), 1)
        capacity = Capacity(share * (prefill_rate or self._forecast.prefill_rate), share)
        for tenant, line in self._lines.items():
            line.arrange(jobs[tenant], now, capacity)
        error = DeadlineMissed("its deadline cannot be met any more", retry_after=max(1.0, backlog))
        return [Shed(seq, error) for seq in late]

    def _catch_up(self, tenant: str) -> None:
        """Who was away does not come back with a claim on all that the others got meanwhile."""
        present = {seq.tenant for seq in self._order}
        if len(self._served) > _MOST_TENANTS:
            self._served = {name: self._served[name] for name in present}
        waiting = [self._served[name] for name in present]
        least = min(waiting, default=max(self._served.values(), default=0.0))
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)


def waiting_queue(
    config: SchedulerConfig, cache: CacheConfig, times: StepTimes | None, lengths: OutputLengths
) -> WaitingQueue:
    """Of the configured policy."""
    if config.policy == "slo":
        return DeadlineQueue(config, cache, times, lengths)
    return WaitingQueue()
