"""The engine's loop without threads: scheduler and fake runner, synchronous or steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxserve.api import FinishReason, Request, TokenEvent
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import PageMoves, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.scheduler.sequence import Sequence
from tests.scheduler.fake_runner import FakeRunner, Pending


class Optimist(OutputLengths):
    """Expects every sequence to end with its next token: admits what fits now, so it preempts."""

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        return min(max_tokens, generated + 1), 0.0


class WatchedScheduler(Scheduler):
    """Checks that nobody is preempted twice without having sampled in between."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, **options: Any):
        super().__init__(config, cache, **options)
        self._length_at_preemption: dict[int, int] = {}

    def _preempt(self, seq: Sequence) -> None:
        length = len(seq.tokens) + seq.in_flight
        before = self._length_at_preemption.get(seq.id, seq.num_prompt)
        assert length > before or self._kv_cache.windows, "preempted again without progress"
        self._length_at_preemption[seq.id] = length
        super()._preempt(seq)


class Loop:
    """Collects the events of each request and checks the scheduler's accounts at every turn."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, **options: Any):
        """`options` go to the scheduler, which is an optimist if they say nothing else."""
        options.setdefault("lengths", Optimist())
        self.scheduler = WatchedScheduler(config, cache, **options)
        self.runner = FakeRunner(config, cache)
        self.cache = cache
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.events: dict[str, list[TokenEvent]] = {}
        self.salts: dict[str, str] = {}
        self.over: set[str] = set()
        """Requests that must not have any more events."""
        self.accepted_of_rows: list[int] = []
        """Of each row that verified drafts."""
        self.wasted_rows = self.hit_tokens = self.accepted = self.rows_ahead = 0
        self.arrived = False
        """In the last turn sequences ceased to wait for pages."""
        self.masked_rows = 0
        """Verify rows with masks for their drafts."""
        self.evicted: list[bytes] = []
        """Hashes of the pages that were allocated again."""
        self._content: dict[tuple[int, bytes], list[int | None]] = {}
        """What evicted pages held, by their hashes and groups."""
        for group, pool in enumerate(self.scheduler.pools):
            pool.on_evict.append(partial(self._evict, group))
        self._salts: dict[tuple[int, int], str] = {}
        """Of the requests for which pages were filled last."""

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.salts[request.id] = request.cache_salt
        self.events[request.id] = []
        self.scheduler.check()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.over.add(request_id)
        self.scheduler.check()

    def launch(self) -> StepPlan | None:
        self._take(self.scheduler.await_guides(0.0))
        plan = self.scheduler.plan()
        self.scheduler.check()
        self._move_pages()
        if plan is not None:
            self._check_salts(plan)
            asked = [row.verify for row in plan.rows]
            self.masked_rows += sum(verify is not None and bool(verify.masks) for verify in asked)
            self.rows_ahead += sum(verify is not None and verify.follows for verify in asked)
            self.in_flight.append((plan, self.runner.launch(plan)))
        self.arrived = self.scheduler.poll_host()
        self._move_pages()
        return plan

    def _move_pages(self) -> None:
        tier = self.scheduler.host
        moves = None if tier is None else tier.take()
        if tier is not None and moves is not None:
            tier.launched(self.move_pages(moves))
            self.scheduler.check()

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]:
        """Returns what tells whether they are done."""
        for page, _, group in moves.restores:
            self._salts.pop((group, page), None)
        return self.runner.move_pages(moves)

    def _check_salts(self, plan: StepPlan) -> None:
        """Whoever finds a page filled has the salt of who filled it."""
        running = self.scheduler._running.values()  # pyright: ignore[reportPrivateUsage]
        by_slot = {seq.slot: seq for seq in running}
        for slot, position, page, group in plan.pages:
            seq = by_slot[slot]
            salt, place = self.salts[seq.request_id], (group, page)
            assert position >= seq.shared or self._salts.get(place, salt) == salt, (
                "shared across salts"
            )
            self._salts[place] = salt

    def _evict(self, group: int, page: int, content: bytes) -> None:
        """A page is whole when it is evicted, and equal hashes mean equal keys and values."""
        self.evicted.append(content)
        if not isinstance(self.runner, FakeRunner):
            return  # a device does not show what its pages hold
        if self.cache.own_tokens and self.runner.windows[group] is not None:
            return  # the pages of own tokens are not filled
        held = list(self.runner.kv[group][page])
        assert None not in held, "a page was evicted before it was filled"
        first = self._content.setdefault((group, content), held)
        assert first == held, "evicted too late, or never right"

    def commit(self, *, failing: bool = False) -> None:
        if failing:
            self.fail()
            return
        plan, pending = self.in_flight.popleft()
        sampled = self.runner.collect(pending)
        live = self.scheduler._live  # pyright: ignore[reportPrivateUsage]
        self.wasted_rows += sum(row.seq_id not in live for row in plan.rows)
        verified = (result for row, result in zip(plan.rows, sampled, strict=True) if row.verify)
        self.accepted_of_rows += [len(result.further) for result in verified if result is not None]
        self.accepted += sum(len(result.further) for result in sampled if result is not None)
        self._take(self.scheduler.commit(plan, sampled))

    def fail(self) -> None:
        """The device loses its state and with it all steps in flight."""
        events = self.scheduler.fail([plan for plan, _ in self.in_flight])
        self.in_flight.clear()
        self.runner = FakeRunner(self.runner.config, self.cache)
        self._take(events)

    def _take(self, events: list[TokenEvent]) -> None:
        self.scheduler.check()
        for event in events:
            assert event.request_id not in self.over, "an event after the end"
            assert (event.token is None) == (event.finish is FinishReason.ERROR)
            if event.token is not None:
                assert (event.start is not None) == (not self.events[event.request_id])
                self.hit_tokens += event.cached_tokens
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
