"""The policy `slo`: meets as many deadlines as possible, without starvation, fair to tenants."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from jaxserve.api import DeadlineMissed
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.scheduler.in_time import Capacity, Job, all_in_time, in_time
from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.scheduler.queue import Shed, WaitingQueue
from jaxserve.scheduler.sequence import Sequence

STRETCH = 1000.0
"""A request without a deadline is due after waiting this many times its prefill duration."""

_REVIEW_SECONDS, _REVIEW_SECONDS_EACH = 0.1, 2.5e-4
"""Seconds between reviews of the queue: the larger of the first number and the second per waiting
request. So reviews take at most a few percent of the time."""

_STEP_SECONDS = 10.0
"""Time constant, in seconds, of the moving mean of step times."""

_MARGIN = 0.1
"""Share of the time until a deadline that is kept as a reserve."""

_UNKNOWN_RATE, _UNKNOWN_STEP = 10_000.0, 0.02
"""Prompt tokens per second, and seconds per step, if no step times were measured."""

_MAX_TENANTS = 10_000
"""The most tenants to remember. Beyond this, tenants without waiting requests are forgotten,
because clients can invent keys."""


class _StepPace:
    """The moving mean of step times, in seconds, while there is work."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._steps, self._mark = 0, -math.inf

    def observe(self, steps: int, now: float) -> None:
        """Reports the number of steps since the start."""
        elapsed, done = now - self._mark, steps - self._steps
        if done and elapsed < _STEP_SECONDS:
            kept = math.exp(-elapsed / _STEP_SECONDS)
            self.seconds = self.seconds * kept + (1 - kept) * elapsed / done
        self._steps, self._mark = steps, now

    def rest(self) -> None:
        """Reports that there was no work until now, so that this time counts for no step."""
        self._mark = -math.inf


class _Forecast:
    """Predicts the cost of requests from step times and earlier output lengths."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        times: LearnedTimes | None,
        lengths: OutputLengths,
    ):
        self._lengths = lengths
        self._cache_tokens, self._least_share = cache.usable_tokens, 1 / config.max_num_seqs
        self._times = times
        self._full = _UNKNOWN_STEP
        if times:
            self._full = times.of_decode(config.max_num_seqs, self._cache_tokens)
        self.step = _StepPace(self._full)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self._times.prefill_rate if self._times else _UNKNOWN_RATE

    def decode(self, seq: Sequence, generated: int) -> float:
        """Returns the seconds of its decode steps, times its share of the cache or of the slots."""
        context = seq.num_prompt + generated / 2
        share = max(context / self._cache_tokens, self._least_share)
        return generated * self.step.seconds * share

    def job(self, seq: Sequence) -> Job:
        step = self.step.seconds
        expected, deviation, short = self._lengths.of_new(seq.max_generated)
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
    """Returns the deadline minus a reserve for prediction errors."""
    return deadline if deadline == math.inf else deadline - _MARGIN * (deadline - arrived)


class _Line:
    """The waiting requests of one tenant.

    First come requests that can meet their deadlines: by `_cost` if all of them still can, else by
    due time. Then come the others, the least work first.
    """

    def __init__(self) -> None:
        self._in_time: list[Job] = []
        self._rest: list[Job] = []
        """In both lists the next request is the last element."""
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
        # As of the next review, so that even a new request has waited some time.
        then = now + _REVIEW_SECONDS
        by_cost = sorted(self._in_time, key=lambda job: (_cost(job, then), job.seq.id))
        self._cheapest_last = all_in_time(by_cost, now, capacity)
        if self._cheapest_last:
            self._in_time = by_cost
        self._in_time.reverse()
        self._rest.sort(key=lambda job: (-job.decode, -job.seq.id))

    def insert(self, job: Job) -> None:
        """Adds a request. Until the next `arrange` it counts as in time, with the lowest cost."""
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
    """Returns the sort key of a job; the lowest goes first.

    The key is minus the waiting time at `then`, divided by the prefill time and by the span of the
    answer. Smith's rule (1956): the total waiting cost is lowest if jobs run in order of cost per
    work. A second of waiting costs more for short answers, and more the longer a request has
    waited. So no request starves.
    """
    return (job.seq.arrived - then) / (job.prefill * job.span)


class DeadlineQueue(WaitingQueue):
    """The waiting queue in order of deadlines, fair among tenants.

    - A request is due at the deadline of its first token, or early enough to finish its answer in
      time. Without a deadline it is due after `STRETCH` times its prefill duration.
    - If that order makes no request late, requests go by waiting cost (`_cost`): short prompts and
      answers first, equal ones by arrival. Otherwise they go by due time.
    - If not all can be in time, the requests with the most work go last (`in_time`).
    - A request that would be late even if admitted at once is removed.
    - The tenant that received the least service comes first. All rules above apply within one
      tenant, so a client cannot gain over others by claiming early deadlines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        times: LearnedTimes | None,
        lengths: OutputLengths,
    ):
        super().__init__()
        self._forecast = _Forecast(config, cache, times, lengths)
        self._served: dict[str, float] = {}
        """Seconds of device time spent on each known tenant, expected work included."""
        self._charged: dict[int, float] = {}
        """Expected decode seconds that `_served` contains, by id of admitted sequences."""
        self._lines: dict[str, _Line] = {}
        """By tenant; only tenants with waiting requests."""
        self._returning: list[Sequence] = []
        """Preempted sequences by rank. They go first, because their clients already have tokens."""
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
            job = self._forecast.job(seq)  # first: if it raises, nothing has changed
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
        """Charges the tenant with the real decode time instead of the expected one."""
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
        """Updates the service account of a tenant that submits a request.

        A tenant that returns gets no credit for the time it was away. A new tenant starts behind
        the others. Otherwise a client that invents a key per request could block everybody.
        """
        if len(self._served) > _MAX_TENANTS:
            self._served = {name: self._served[name] for name in self._lines}
        waiting = [self._served[name] for name in self._lines]
        waiting = waiting or [max(self._served.values(), default=0.0)]
        known = self._served.get(tenant)
        self._served[tenant] = max(waiting) if known is None else max(known, min(waiting))


def waiting_queue(
    config: SchedulerConfig, cache: CacheConfig, times: LearnedTimes | None, lengths: OutputLengths
) -> WaitingQueue:
    """Returns an empty queue of the configured policy."""
    if config.policy == "slo":
        return DeadlineQueue(config, cache, times, lengths)
    return WaitingQueue()
