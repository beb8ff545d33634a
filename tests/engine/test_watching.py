"""What people who watch are shown of steps, pages and the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import pytest

from jaxserve.engine import loop
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.step_times import StepTimes
from jaxserve.views import PageState
from tests.engine.driver import (
    CACHE,
    GatedRunner,
    begin,
    events_of,
    make_engine,
    request,
    serving,
    until,
)
from tests.scheduler.fake_runner import Pending

TIMES = StepTimes(decode={4: 0.001}, mixed={16: 0.004}, decode_context=0.0001)


class Reporting(GatedRunner):
    """Reports the buckets of its steps, as the real one does."""

    def __init__(self, metrics: Metrics):
        super().__init__()
        self._metrics = metrics
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> Pending:
        self._plans.append(plan)
        return super().launch(plan)

    def collect(self, pending: Pending) -> list[Sampled | None]:
        plan = self._plans.popleft()
        kind, bucket = ("decode", 4) if plan.decode_only else ("mixed", 16)
        self._metrics.observe_step(kind, str(bucket), 0.001, plan.num_tokens, bucket, late=True)
        return super().collect(pending)


async def test_a_step_is_shown_with_its_bucket_its_rows_and_its_expected_time() -> None:
    metrics = Metrics("tiny")
    async with serving(Reporting(metrics), metrics=metrics, times=TIMES) as engine:
        assert engine.steps_since(0) == []
        await events_of(engine.generate(request(2, max_tokens=4)))
        await asyncio.sleep(0.05)  # the last step is read after the last event's
        first, *others = engine.steps_since(0)
        assert (first.number, first.kind, first.bucket) == (1, "mixed", 16)
        assert (first.decode_rows, first.chunks, first.chunk_tokens) == (0, 1, 3)
        assert first.expected == 0.004
        assert first.late
        assert [step.number for step in others] == list(range(2, 2 + len(others)))
        for index, step in enumerate(others[:3]):
            assert (step.kind, step.bucket, step.decode_rows, step.chunks) == ("decode", 4, 1, 0)
            assert step.expected is not None
            assert abs(step.expected - (0.001 + 0.0001 * (3 + index))) < 1e-9
        newest = others[-1].number
        assert [step.number for step in engine.steps_since(newest - 1)] == [newest]
        assert engine.steps_since(newest) == []
        assert engine.bucket_seconds() == {"decode": {4: 0.001}, "mixed": {16: 0.004}}


async def test_only_the_newest_steps_are_kept() -> None:
    async with serving(GatedRunner()) as engine:
        for number in range(4):
            await events_of(engine.generate(request(number, max_tokens=50)))
        steps = engine.steps_since(0)
        assert len(steps) == 64
        assert [step.number for step in steps] == list(range(steps[0].number, steps[0].number + 64))
        assert steps[0].expected is None, "nothing was measured"
        assert engine.bucket_seconds() == {}


async def test_an_engine_at_rest_keeps_no_step_and_goes_on_counting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_QUIET", 0.05)
    async with serving(GatedRunner()) as engine:
        await events_of(engine.generate(request(0)))
        await until(lambda: engine.steps_since(0) == [])
        monkeypatch.setattr(loop, "_QUIET", 10.0)
        await events_of(engine.generate(request(1)))
        assert engine.steps_since(0)[0].number > 8


async def test_pages_and_those_that_wait_are_shown() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        running = await begin(engine, runner, *(request(n, max_tokens=50) for n in range(4)))
        late = replace(request(5), ttft_slo=60.0)
        waiting = [asyncio.create_task(events_of(engine.generate(r))) for r in (request(4), late)]
        await until(lambda: engine.status().waiting == 2)  # both are there before the step ends
        runner.let_one_step_go()
        await until(lambda: (now := engine.occupancy(1)) is not None and len(now.waiting) == 2)
        seen = engine.occupancy(1000)
        assert seen is not None
        lefts = [each.left for each in seen.waiting]
        assert lefts[0] is None
        assert lefts[1] is not None and 0 < lefts[1] <= 60
        pages = seen.pages
        assert (pages.page_size, pages.total, pages.stride) == (4, 64, 1)
        held = [state for state in pages.states if state in (PageState.HELD, PageState.SHARED)]
        assert len(pages.states) == 64
        assert len(held) == pages.total - pages.free > 0
        runner.let_go()
        await asyncio.gather(*map(events_of, running), *waiting)
        await asyncio.sleep(0.05)
        after = engine.occupancy(1000)
        assert after is not None and not after.waiting
        assert after.pages.free == 64
        assert list(after.pages.states).count(PageState.CACHED) == after.pages.cached > 0
        few = engine.occupancy(10)
        assert few is not None
        assert few.pages.stride == 7
        assert few.pages.states == after.pages.states[::7]


async def test_before_it_serves_there_is_nothing_to_see() -> None:
    engine = make_engine(GatedRunner())
    assert engine.occupancy(10) is None
    assert engine.steps_since(0) == []
    assert engine.bucket_seconds() == {}


async def test_looking_all_the_time_disturbs_nothing() -> None:
    async with serving(GatedRunner()) as engine:

        async def look() -> None:
            while True:
                assert engine.occupancy(CACHE.num_pages) is not None
                engine.steps_since(0)
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        streams = [events_of(engine.generate(request(n, max_tokens=40))) for n in range(40)]
        for events in await asyncio.gather(*streams):
            assert len(events) == 40
        assert not looking.done()
        looking.cancel()
