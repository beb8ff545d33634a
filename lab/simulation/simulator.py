"""The scheduler on simulated time: traffic in, what each request experienced out.

Steps take what a table of measured step times says; everything else is the real scheduler, driven
one step ahead as the engine does.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxserve.api import FinishReason, Overloaded, Rejected, Request
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.step_times import StepTimes
from lab.simulation.cohort import cohort_of

STOP = -2
"""The token that ends a simulated answer; requests have it among their stop tokens."""

_TOKEN = 0

_GOES_ON, _STOPS = Sampled(_TOKEN), Sampled(STOP)

_WORTH_SKIPPING = 3
"""Turns."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, when it comes, and what nobody knows before: how long its answer will be."""

    at: float
    request: Request
    output: int
    kind: str = ""
    """For reports."""
    patience: float | None = None
    """The client leaves if its answer is not complete after so many seconds."""


@dataclass(kw_only=True)
class Outcome:
    """One request's times, in seconds from the start of the simulation."""

    arrival: Arrival
    length: int = field(init=False)
    """Tokens of its prompt and of its answer but the last."""
    tokens: list[float] = field(default_factory=list[float])
    cached: int = 0
    finished: bool = False
    refused: bool = False
    """At once or later, before its first token."""

    def __post_init__(self) -> None:
        self.length = len(self.arrival.request.prompt) + self.arrival.output - 1

    @property
    def ended(self) -> bool:
        """By the server; not so if the client left."""
        return self.finished or self.refused

    @property
    def ttft(self) -> float | None:
        return self.tokens[0] - self.arrival.at if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None before the second."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that happened; times in seconds."""

    outcomes: list[Outcome]
    seconds: float
    steps: int
    preemptions: int
    busy: float
    """Share of the time in which the device computed."""

    @property
    def tokens_per_second(self) -> float:
        return sum(len(outcome.tokens) for outcome in self.outcomes) / self.seconds


class _Launched(NamedTuple):
    plan: StepPlan
    done: float
    """When the device will be done with it."""
    took: float


class Simulator:
    """One scheduler and its clock. `times` tell how long steps take, `known` what it believes."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        times: StepTimes,
        *,
        known: StepTimes | None = None,
        lengths: OutputLengths | None = None,
        host: float = 0.0,
    ):
        """`host`: seconds that the engine's thread takes per step beside waiting."""
        self.now = 0.0
        self.scheduler = Scheduler(
            config, cache, times=known or times, lengths=lengths, clock=lambda: self.now
        )
        self._times = times
        self._decodes_teach = known is not None and (
            (known.decode, known.decode_context) != (times.decode, times.decode_context)
        )
        """Each of their steps changes what the scheduler believes: none may be left out."""
        self._host = host
        self._by_id: dict[str, Outcome] = {}
        self._by_seq: list[Outcome] = []
        self._in_flight: deque[_Launched] = deque()
        self._leaving: list[tuple[float, str]] = []
        """When clients leave, the earliest first."""
        self._over: deque[float] = deque()
        """When clients were done with a request, however it ended."""
        self._steps, self._busy = 0, 0.0

    def run(
        self,
        traffic: Iterable[Arrival],
        *,
        until: float = float("inf"),
        clients: int | None = None,
        pause: float = 0.0,
    ) -> Result:
        """Serve until everything has ended, or until the clock says `until`.

        Args:
          clients: a closed loop of so many: each sends its next request `pause` seconds after its
            last one was over. Beyond the first of each client, `at` is only the order.
        """
        outcomes = [Outcome(arrival=each) for each in sorted(traffic, key=lambda each: each.at)]
        waiting, later = deque(outcomes[:clients]), deque(outcomes[len(outcomes[:clients]) :])
        while self.now < until:
            while later and self._over:
                following = later.popleft()
                following.arrival = replace(following.arrival, at=self._over.popleft() + pause)
                insort(waiting, following, key=lambda outcome: outcome.arrival.at)
            while waiting and waiting[0].arrival.at <= self.now:
                self._arrive(waiting.popleft())
            if not self.scheduler.has_work and not self._in_flight:
                if later and self._over:
                    continue
                if not waiting:
                    break
                self.now = waiting[0].arrival.at
                continue
            if not self._skip_to(min(until, waiting[0].arrival.at if waiting else until)):
                self.turn()
        return Result(
            outcomes=outcomes,
            seconds=self.now,
            steps=self._steps,
            preemptions=self.scheduler.num_preemptions,
            busy=self._busy / self.now if self.now else 0.0,
        )

    def send(self, arrival: Arrival) -> Outcome:
        """Give it a request now; `run` then moves the clock. For lab.simulation.fleet.

        Returns what the request experiences; it is filled while the clock goes on.
        """
        self.now = max(self.now, arrival.at)
        outcome = Outcome(arrival=arrival)
        self._arrive(outcome)
        return outcome

    def turn(self) -> None:
        """Launch a step if there is one, and wait for the one before it."""
        while self._leaving and self._leaving[0][0] <= self.now:
            request_id = heapq.heappop(self._leaving)[1]
            self.scheduler.abort(request_id)
            if not self._by_id[request_id].ended:
                self._over.append(self.now)
        for request_id, _ in self.scheduler.shed():
            self._refuse(self._by_id[request_id])
        plan = self.scheduler.plan()
        self.now += self._host
        pending = self._in_flight.popleft() if self._in_flight else None
        if plan is not None:
            took = self._times.of(plan)
            begun = max(self.now, pending.done if pending else 0.0)
            self._in_flight.append(_Launched(plan, begun + took, took))
            self._steps, self._busy = self._steps + 1, self._busy + took
        if pending is not None:
            self.now = max(self.now, pending.done)
            self.scheduler.learn(pending.plan, pending.took)
            self._commit(pending.plan)

    def _skip_to(self, horizon: float) -> bool:
        """Many turns at once, if they only let the same sequences decode; whether there were any.

        What happens and when is as with `turn`, to the last bit.
        """
        if len(self._in_flight) != 1 or self._decodes_teach:
            return False
        horizon = min(horizon, self.scheduler._waiting.next_review)
        if self._leaving:
            horizon = min(horizon, self._leaving[0][0])
        plan, done, took = self._in_flight[0]
        outcomes = [self._by_seq[row.seq_id] for row in plan.rows]
        most = min(outcome.arrival.output - len(outcome.tokens) for outcome in outcomes) - 1
        if most < _WORTH_SKIPPING or done >= horizon:
            return False
        cohort = cohort_of(self.scheduler, plan, _TOKEN)
        if cohort is None:
            return False
        most, times = min(most, cohort.max_steps), list[float]()
        base, per_token = self._times.decode_line(len(outcomes))
        now, busy = self.now, self._busy
        while now < horizon and cohort.steps < most:
            following = base + cohort.context * per_token
            if not cohort.step():
                break
            took = following
            launched = now + self._host
            now = max(launched, done)
            times.append(now)
            busy += took
            done = now + took
        self.now, self._busy = now, busy
        self._steps += cohort.steps
        self.scheduler.num_steps += cohort.steps
        self._in_flight[0] = _Launched(cohort.end(), done, took)
        for outcome in outcomes:
            outcome.tokens += times
        return bool(times)

    def _arrive(self, outcome: Outcome) -> None:
        try:
            self.scheduler.add(outcome.arrival.request)
        except (Overloaded, Rejected):
            self._refuse(outcome)
        else:
            name, patience = outcome.arrival.request.id, outcome.arrival.patience
            self._by_id[name] = outcome
            self._by_seq.append(outcome)
            if patience is not None:
                heapq.heappush(self._leaving, (outcome.arrival.at + patience, name))

    def _refuse(self, outcome: Outcome) -> None:
        outcome.refused = True
        self._over.append(self.now)

    def _commit(self, plan: StepPlan) -> None:
        sampled: list[Sampled | None] = []
        for row in plan.rows:
            if row.samples:
                ends = row.start + row.num_tokens >= self._by_seq[row.seq_id].length
                sampled.append(_STOPS if ends else _GOES_ON)
            else:
                sampled.append(None)
        now = self.now
        for event in self.scheduler.commit(plan, sampled):
            outcome = self._by_id[event.request_id]
            outcome.tokens.append(now)
            if event.start is not None:
                outcome.cached = event.cached_tokens
            if event.finish is not None:
                outcome.finished = event.finish is not FinishReason.ERROR
                self._over.append(now)
