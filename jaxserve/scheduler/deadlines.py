"""Policy slo: as many requests in time as possible, nobody starved, tenants alike."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from jaxserve.api import DeadlineMissed
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.scheduler.in_time import Capacity, Job, all_in_time, in_time
from jaxserve.scheduler.queue import Shed, WaitingQueue
from jaxserve.scheduler.sequence import Sequence
from jaxserve.step_times import StepTimes

STRETCH = 1000.0
"""Beside others that have deadlines, who has none is due when it has waited this many times as
long as its prefill takes."""

_REVIEW_SECONDS, _REVIEW_SECONDS_EACH = 0.1, 2.5e-4
"""How old a decision about who can be in time may get: where many wait, the second times their
number, so that deciding takes a few hundredths of the time at most."""

_STEP_SECONDS = 10.0
"""Time after which a step counts for 1/e in what steps take of late."""

_MARGIN = 0.1
"""Part of the time until a deadline that is not planned with."""

_UNKNOWN_RATE, _UNKNOWN_STEP = 10_000.0, 0.02
"""Prompt tokens per second, and seconds of a step, where no step times were measured."""

_MOST_TENANTS = 10_000
"""Clients make up their keys as they like; those that are away are forgotten beyond this."""


class _StepPace:
    """Seconds that a step takes of late, while there is something to do."""

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

    def rest(self) -> None:
        """Until now there was nothing to do: that time is no step's."""
        self._mark = -math.inf


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
        self._cache_tokens, self._least_share = cache.usable_tokens, 1 / config.max_num_seqs
        self.prefill_rate = times.prefill_rate if times else _UNKNOWN_RATE
        self._full = _UNKNOWN_STEP
        if times:
            self._full = times.of_decode(config.max_num_seqs, self._cache_tokens)
        self.step = _StepPace(self._full)

    def decode(self, seq: Sequence, generated: int) -> float:
        """Seconds of decode steps, times its share of them: of the cache, or of the slots."""
        context = seq.num_prompt + generated / 2
        share = max(context / self._cache_tokens, self._least_share)
        return generated * self.step.seconds * share

    def job(self, seq: Sequence) -> Job:
        step = self.step.seconds
        expected, deviation, short = self._lengths.of_new(seq.most_generated)
        prefill = seq.uncached / self.prefill_rate
        decode = self.decode(seq, expected)
        if seq.first_by == seq.ended_by == math.inf:
            due = seq.arrived + STRETCH * prefill
            return Job(due, math.inf, seq.uncached, decode, expected * step, False, seq)
        answer = (expected + deviation) * step
        due = min(_early(seq.arrived, seq.first_by), _early(seq.arrived, seq.ended_by) - answer)
        lost = min(seq.first_by, seq.ended_by - short * min(step, self._full))
        return Job(due, lost - prefill, seq.uncached, decode, expected * step, True, seq)


def _early(arrived: float, deadline: float) -> float:
    """Predictions err."""
    return deadline if deadline == math.inf else deadline - _MARGIN * (deadline - arrived)


class _Line:
    """Who waits of one tenant.

    By what waiting costs over the work (`_cost`), if so all are in time who can be; else by
    deadline. Then those who cannot be in time, least work first.
    """

    def __init__(self) -> None:
        self._in_time: list[Job] = []
        self._rest: list[Job] = []
        """The next one is last, in both."""
        self._cheapest_last = True

    def __bool__(self) -> bool:
        return bool(self._in_time or self._rest)

    def __iter__(self) -> Iterator[Sequence]:
        for jobs in (self._in_time, self._rest):
            yield from (job.seq for job in reversed(jobs))

    @property
    def first(self) -> Sequence:
        return (self._in_time or self._rest)[-1].seq

    def arrange(self, jobs: list[Job], now: float, capacity: Capacity) -> None:
        jobs.sort(key=lambda job: (job.due, job.seq.id))
        kept = in_time(jobs, now, capacity)
        self._in_time, self._rest = [], []
        for job, keep in zip(jobs, kept, strict=True):
            (self._in_time if keep else self._rest).append(job)
        # As of the next review, so that who has just come has waited, too.
        then = now + _REVIEW_SECONDS
        by_cost = sorted(self._in_time, key=lambda job: (_cost(job, then), job.seq.id))
        self._cheapest_last = all_in_time(by_cost, now, capacity)
        if self._cheapest_last:
            self._in_time = by_cost
        self._in_time.reverse()
        self._rest.sort(key=lambda job: (-job.decode, -job.seq.id))

    def insert(self, job: Job) -> None:
        """Until all are arranged it is taken to be in time, and to cost least by waiting."""
        if self._cheapest_last:
            self._in_time.insert(0, job)
        else:
            insort(self._in_time, job, key=lambda job: (-job.due, -job.seq.id))

    def remove(self, seq: Sequence) -> None:
        for jobs in (self._in_time, self._rest):
            for place in range(len(jobs) - 1, -1, -1):
                if jobs[place].seq is seq:
                    del jobs[place]
                    return
        raise AssertionError("the sequence is not in its tenant's line")


def _cost(job: Job, then: float) -> float:
    """Of serving it before others, less goes first: minus the time that it will have waited, over
    its prefill and over the span of its answer.

    Smith (1956): the sum of what waiting costs is least if jobs are done by its cost over their
    work. A second costs the more the shorter the answer is that somebody waits for; and the longer
    they have waited, so that nobody starves.
    """
    return (job.seq.arrived - then) / (job.prefill * job.span)


class DeadlineQueue(WaitingQueue):
    """Sequences by the latest time at which their first tokens can come and all be in time.

    - Each is due at its first token's deadline, or early enough for the whole answer before the
      answer's. One without a deadline is due when it has waited `STRETCH` times as long as its
      prefill takes.
    - If nobody is late by it, they go in order of what their waiting costs (`_cost`): short prompts
      and short answers early, equal ones in order of arrival, and whoever waits long enough is
      first. Otherwise they go in order of due times.
    - When not all can be in time, those with most work are put behind the others (`in_time`).
    - Who cannot be in time even if it is admitted at once is taken out.
    - The tenant that got least comes first; all this is among a tenant's own, so nobody gains over
      others by the deadlines that it claims.
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
        """Seconds that the device spent on each tenant, or is expected to; of all that came."""
        self._charged: dict[int, float] = {}
        """By id of those that were admitted: what is in there for their decode steps."""
        self._lines: dict[str, _Line] = {}
        """By tenant, those that have somebody."""
        self._returning: list[Sequence] = []
        """Preempted, by rank: their clients have tokens already."""
        self._reviewed = -math.inf

    @property
    def next_review(self) -> float:
        if not self._order:
            return math.inf
        return self._reviewed + max(_REVIEW_SECONDS, _REVIEW_SECONDS_EACH * len(self._order))

    def join(self, seq: Sequence, now: float) -> None:
        if not self._order and not self._charged:
            self._forecast.step.rest()
        seq.rank = 0.0, seq.id
        self._catch_up(seq.tenant)
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        if seq.admitted >= 0:
            insort(self._returning, seq, key=lambda seq: seq.rank)
        else:
            job = self._forecast.job(seq)  # first: if it fails nothing has changed
            self._lines.setdefault(seq.tenant, _Line()).insert(job)
        super().push(seq)

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
        return self._lines[min(self._lines, key=self._standing)].first if self._lines else None

    def upcoming(self) -> Iterator[Sequence]:
        yield from self._returning
        for tenant in sorted(self._lines, key=self._standing):
            yield from self._lines[tenant]

    def _standing(self, tenant: str) -> tuple[float, str]:
        return self._served[tenant], tenant

    def admit(self, seq: Sequence, now: float) -> None:
        self.remove(seq)
        if seq.admitted < 0:
            job = self._forecast.job(seq)
            self._charged[seq.id] = job.decode
            self._served[seq.tenant] += job.decode + job.prefill / self._forecast.prefill_rate

    def ended(self, seq: Sequence) -> None:
        """Its tenant is charged with what it really took: longer answers than others give to
        requests that ask for as much are not to be had for the price of theirs."""
        charged = self._charged.pop(seq.id, None)
        if charged is not None and seq.tenant in self._served:
            self._served[seq.tenant] += self._forecast.decode(seq, seq.generated) - charged

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
        """Who was away does not come back with a claim on all that the others got meanwhile.

        Who is new begins behind the others: a client that makes up a key for each request would
        keep the others waiting for ever.
        """
        if len(self._served) > _MOST_TENANTS:
            self._served = {name: self._served[name] for name in self._lines}
        waiting = [self._served[name] for name in self._lines]
        waiting = waiting or [max(self._served.values(), default=0.0)]
        known = self._served.get(tenant)
        self._served[tenant] = max(waiting) if known is None else max(known, min(waiting))


def waiting_queue(
    config: SchedulerConfig, cache: CacheConfig, times: StepTimes | None, lengths: OutputLengths
) -> WaitingQueue:
    """Of the configured policy."""
    if config.policy == "slo":
        return DeadlineQueue(config, cache, times, lengths)
    return WaitingQueue()
