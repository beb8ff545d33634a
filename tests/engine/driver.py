"""An engine over a device made of lists, which can be held and which fails when told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from jaxserve.api import (
    EngineLimits,
    Request,
    SamplingParams,
    TokenEvent,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine.engine import AsyncEngine, Progress
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.step_times import StepTimes
from tests.scheduler.fake_runner import VOCAB, FakeRunner, Pending, solo

SCHEDULER = SchedulerConfig(
    max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, max_queued=100
)
CACHE = CacheConfig(num_pages=65, page_size=4)


class GatedRunner(FakeRunner):
    """A device that can be held before a launch, and that fails when told to."""

    def __init__(self, config: SchedulerConfig = SCHEDULER, cache: CacheConfig = CACHE):
        super().__init__(config, cache)
        self._args = (config, cache)
        self._open = threading.Event()
        self._open.set()
        self._permits = threading.Semaphore(0)
        self.held = False
        self.fail_launch = self.fail_collect = self.fail_reset = False
        self.num_resets = 0

    def hold(self) -> None:
        """From now on each launch waits for `let_one_step_go` or `let_go`."""
        self._open.clear()
        while self._permits.acquire(blocking=False):
            pass

    def let_one_step_go(self) -> None:
        self._permits.release()

    def let_go(self) -> None:
        self._open.set()

    def launch(self, plan: StepPlan) -> Pending:
        while not self._open.is_set() and not self._permits.acquire(timeout=0.002):
            self.held = True
        self.held = False
        if self.fail_launch:
            self.fail_launch = False
            raise RuntimeError("the device is on fire")
        return super().launch(plan)

    def collect(self, pending: Pending) -> list[Sampled | None]:
        if self.fail_collect:
            self.fail_collect = False
            raise RuntimeError("the device caught fire")
        return super().collect(pending)

    def reset(self) -> None:
        if self.fail_reset:
            raise RuntimeError("the device is gone")
        self.num_resets += 1
        super().__init__(*self._args)


type Engine = AsyncEngine[Pending]


def make_engine(
    runner: GatedRunner,
    *,
    scheduler: SchedulerConfig = SCHEDULER,
    before: Callable[[Progress], None] = lambda report: None,
    metrics: Metrics | None = None,
    times: StepTimes | None = None,
    limits: EngineLimits | None = None,
) -> Engine:
    """Not started. `before` runs on the engine's thread ahead of the rest of the build."""

    def build(report: Progress) -> Parts[Pending]:
        before(report)
        return Parts(Scheduler(scheduler, CACHE, times=times), runner)

    limits = limits or EngineLimits(scheduler.max_model_len, VOCAB)
    return AsyncEngine(build=build, limits=limits, metrics=metrics or Metrics("tiny"))


@asynccontextmanager
async def serving(runner: GatedRunner, **options: Any) -> AsyncGenerator[Engine]:
    engine = make_engine(runner, **options)
    await engine.start()
    try:
        yield engine
    finally:
        runner.let_go()
        await engine.stop()


def request(number: int = 0, *, max_tokens: int = 8, **params: Any) -> Request:
    prompt = tuple((number + i) % VOCAB for i in range(1 + number % 9))
    return Request(
        id=f"r{number}",
        prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=number, **params),
    )


def request_of_50(number: int) -> Request:
    return request(number, max_tokens=50)


async def events_of(stream: AsyncGenerator[list[TokenEvent]]) -> list[TokenEvent]:
    return [event async for events in stream for event in events]


async def first(stream: AsyncGenerator[list[TokenEvent]]) -> TokenEvent:
    return (await asyncio.wait_for(anext(stream), 5))[0]


async def begin(
    engine: Engine, runner: GatedRunner, *requests: Request
) -> tuple[AsyncGenerator[list[TokenEvent]], ...]:
    """Streams that had their first token, of requests with many to go; the device is held."""
    runner.hold()
    streams = tuple(engine.generate(each) for each in requests)
    readers = [asyncio.ensure_future(first(stream)) for stream in streams]
    while not all(reader.done() for reader in readers):
        runner.let_one_step_go()
        await asyncio.sleep(0.005)
    await asyncio.gather(*readers)
    runner.hold()
    await until(lambda: runner.held)
    return streams


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def assert_is_solo(events: list[TokenEvent], of: Request) -> None:
    tokens, reason = solo(of, SCHEDULER, CACHE)
    assert [event.token for event in events] == tokens
    assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [reason]
    assert {event.request_id for event in events} == {of.id}


def is_whole(engine: Engine) -> bool:
    status = engine.status()
    return status.free_pages == status.total_pages and status.running == status.waiting == 0
