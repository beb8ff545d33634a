"""The engine's loop without threads: scheduler and fake runner, synchronous or steps ahead."""

from __future__ import annotations

from collections import deque

from jaxserve.api import FinishReason, Request, TokenEvent
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import StepPlan
from jaxserve.scheduler import Scheduler
from tests.scheduler.fake_runner import FakeRunner, Pending


class Loop:
    """Collects the events of each request and checks the scheduler's accounts at every turn."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        self.scheduler = Scheduler(config, cache)
        self.runner = FakeRunner(config, cache)
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.events: dict[str, list[TokenEvent]] = {}
        self.over: set[str] = set()
        """Requests that must not have any more events."""
        self._length_at_preemption: dict[int, int] = {}
        self.wasted_rows = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.events[request.id] = []
        self.scheduler.check()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.over.add(request_id)
        self.scheduler.check()

    def launch(self) -> StepPlan | None:
        preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.plan()
        self.scheduler.check()
        self._check_preemptions(self.scheduler.num_preemptions - preemptions)
        if plan is not None:
            self.in_flight.append((plan, self.runner.launch(plan)))
        return plan

    def commit(self, *, failing: bool = False) -> None:
        plan, pending = self.in_flight.popleft()
        sampled = self.runner.collect(pending)
        live = self.scheduler._live  # pyright: ignore[reportPrivateUsage]
        self.wasted_rows += sum(row.seq_id not in live for row in plan.rows)
        events = self.scheduler.fail(plan) if failing else self.scheduler.commit(plan, sampled)
        self.scheduler.check()
        for event in events:
            assert event.request_id not in self.over, "an event after the end"
            assert (event.token is None) == (event.finish is FinishReason.ERROR)
            self.events[event.request_id].append(event)
            if event.finish is not None:
                self.over.add(event.request_id)

    def turn(self, ahead: int = 1) -> bool:
        """Launch a step if there is one, commit until `ahead` are in flight; False when idle."""
        if self.launch() is None:
            if not self.in_flight:
                assert not self.scheduler.has_work, "there is work, but nothing can be planned"
                return False
            self.commit()
        while len(self.in_flight) > ahead:
            self.commit()
        return True

    def run(self, ahead: int = 1) -> None:
        for _ in range(2000):
            if not self.turn(ahead):
                return
        raise AssertionError("no progress")

    def tokens(self, request_id: str) -> list[int]:
        return [event.token for event in self.events[request_id] if event.token is not None]

    def finish(self, request_id: str) -> FinishReason | None:
        events = self.events[request_id]
        return events[-1].finish if events else None

    def _check_preemptions(self, count: int) -> None:
        """Whoever was just preempted has sampled since the last time."""
        waiting = self.scheduler._waiting  # pyright: ignore[reportPrivateUsage]
        for seq in list(waiting)[:count]:
            length = len(seq.tokens) + seq.in_flight
            before = self._length_at_preemption.get(seq.id, seq.num_prompt)
            assert length > before, "preempted again without progress"
            self._length_at_preemption[seq.id] = length
