"""The engine thread and the streams of the event loop, over a device made of lists."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.api import (
    EngineFailed,
    EngineLimits,
    FinishReason,
    Overloaded,
    Rejected,
    Request,
    SamplingParams,
    TokenEvent,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import AsyncEngine, Parts, Progress
from jaxserve.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
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
) -> Engine:
    """Not started. `before` runs on the engine's thread ahead of the rest of the build."""

    def build(report: Progress) -> Parts[Pending]:
        before(report)
        return Parts(Scheduler(scheduler, CACHE), runner)

    limits = EngineLimits(scheduler.max_model_len, VOCAB)
    return AsyncEngine(build=build, limits=limits, metrics=Metrics("tiny"))


@asynccontextmanager
async def serving(runner: GatedRunner, **options: Any) -> AsyncIterator[Engine]:
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


async def events_of(stream: AsyncGenerator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in stream]


async def first(stream: AsyncGenerator[TokenEvent]) -> TokenEvent:
    return await asyncio.wait_for(anext(stream), 5)


async def begin(
    engine: Engine, runner: GatedRunner, *requests: Request
) -> tuple[AsyncGenerator[TokenEvent], ...]:
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


# Streams.


async def test_a_stream_yields_its_tokens_in_order_and_ends() -> None:
    async with serving(GatedRunner()) as engine:
        assert_is_solo(await events_of(engine.generate(request())), request())
        assert engine.num_streams == 0
        await until(lambda: is_whole(engine))


async def test_a_stop_token_ends_the_stream_with_that_token() -> None:
    stopping = request(stop_token_ids=frozenset(range(VOCAB)))
    async with serving(GatedRunner()) as engine:
        (event,) = await events_of(engine.generate(stopping))
        assert event.token is not None and event.finish is FinishReason.STOP


async def test_a_token_arrives_before_the_next_step_is_read() -> None:
    """One step ahead: the second step is launched, the first token out, the third step held."""
    runner = GatedRunner()
    async with serving(runner) as engine:
        runner.hold()
        stream = engine.generate(request())
        waiting = asyncio.ensure_future(first(stream))
        runner.let_one_step_go()
        runner.let_one_step_go()
        assert (await waiting).token is not None
        await until(lambda: runner.launched == 2)
        assert runner.collected == 1
        await stream.aclose()


async def test_many_streams_at_once_each_get_their_own() -> None:
    """Sixty requests on four slots."""
    requests = [request(number, max_tokens=1 + number % 12) for number in range(60)]
    async with serving(GatedRunner()) as engine:
        streams = [events_of(engine.generate(each)) for each in requests]
        for each, events in zip(requests, await asyncio.gather(*streams), strict=True):
            assert_is_solo(events, each)
        await until(lambda: is_whole(engine))


async def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    async def impatient(number: int) -> None:
        stream = engine.generate(request(number, max_tokens=50))
        for _ in range(number % 5):
            await anext(stream)
        await stream.aclose()

    patient = [request(number) for number in range(100, 110)]
    async with serving(GatedRunner()) as engine:
        streams = [events_of(engine.generate(each)) for each in patient]
        results = await asyncio.gather(*streams, *(impatient(number) for number in range(40)))
        for each, events in zip(patient, results, strict=False):
            assert events is not None
            assert_is_solo(events, each)
        assert engine.num_streams == 0
        await until(lambda: is_whole(engine))


# Leaving early.


async def test_closing_a_stream_frees_its_pages_within_one_step() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        leaving, staying = await begin(engine, runner, request_of_50(8), request_of_50(0))
        free = engine.status().free_pages
        launched = runner.launched
        await leaving.aclose()
        runner.let_one_step_go()  # planned before
        await until(lambda: engine.status().running == 1)
        assert engine.status().free_pages > free
        assert runner.launched <= launched + 1
        await staying.aclose()
        runner.let_go()
        await until(lambda: is_whole(engine))


async def test_a_cancelled_reader_aborts_its_request() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        runner.hold()
        reader = asyncio.ensure_future(events_of(engine.generate(request())))
        await until(lambda: engine.num_streams == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        runner.let_go()
        await until(lambda: engine.num_streams == 0 and is_whole(engine))


async def test_a_request_aborted_in_the_queue_never_runs() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        streams = await begin(engine, runner, *map(request_of_50, range(4)))
        waiting = asyncio.ensure_future(events_of(engine.generate(request(9))))
        await until(lambda: engine.status().waiting == 1)
        waiting.cancel()
        runner.let_go()
        for stream in streams:
            assert len(await events_of(stream)) == 49
        await until(lambda: is_whole(engine))
        assert request(9).params not in runner.params


# Refusals.


async def test_an_impossible_request_is_rejected_on_the_first_step() -> None:
    empty = Request(id="empty", prompt=(), params=SamplingParams(max_tokens=1))
    too_long = Request(id="long", prompt=(1,) * 64, params=SamplingParams(max_tokens=1))
    async with serving(GatedRunner()) as engine:
        for impossible, message in ((empty, "empty"), (too_long, "64")):
            stream = engine.generate(impossible)
            with pytest.raises(Rejected, match=message):
                await first(stream)
        assert engine.num_streams == 0
        assert_is_solo(await events_of(engine.generate(request())), request())


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    runner = GatedRunner()
    config = SchedulerConfig(
        max_num_seqs=1, max_model_len=64, max_num_batched_tokens=16, max_queued=1
    )
    async with serving(runner, scheduler=config) as engine:
        (running,) = await begin(engine, runner, request_of_50(0))
        queued = asyncio.ensure_future(events_of(engine.generate(request(1))))
        await until(lambda: engine.status().waiting == 1)
        refused = asyncio.ensure_future(first(engine.generate(request(2))))
        await until(lambda: engine.num_streams == 3)
        runner.let_one_step_go()
        with pytest.raises(Overloaded) as refusal:
            await refused
        assert refusal.value.retry_after > 0
        await running.aclose()
        runner.let_go()
        assert_is_solo(await queued, request(1))


async def test_an_id_in_use_is_rejected_and_its_owner_goes_on() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        (owner,) = await begin(engine, runner, request_of_50(0))
        with pytest.raises(Rejected, match="r0"):
            await first(engine.generate(request_of_50(0)))
        runner.let_go()
        assert len(await events_of(owner)) == 49


async def test_a_draining_engine_refuses_new_requests_and_finishes_the_others() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        (running,) = await begin(engine, runner, request_of_50(0))
        engine.drain()
        assert engine.status().phase == "draining" and not engine.status().ready
        with pytest.raises(Overloaded, match="shutting down"):
            await first(engine.generate(request(1)))
        runner.let_go()
        assert len(await events_of(running)) == 49


# Failures.


@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
async def test_a_failed_step_ends_its_streams_with_an_error_and_the_loop_survives(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        streams = await begin(engine, runner, *map(request_of_50, range(2)))
        setattr(runner, where, True)
        runner.let_go()
        for number, stream in enumerate(streams):
            *tokens, end = await events_of(stream)
            assert end == TokenEvent(f"r{number}", None, FinishReason.ERROR)
            assert all(event.finish is None for event in tokens)
        assert_is_solo(await events_of(engine.generate(request(5))), request(5))
        assert "a step failed" in caplog.text and runner.num_resets == 1
        await until(lambda: is_whole(engine))
        assert engine.status().phase == "serving"


async def test_a_failed_step_leaves_those_that_were_not_in_it_alone() -> None:
    """Waiting ones, and running ones whose tokens the lost device state held."""
    runner = GatedRunner()
    async with serving(runner) as engine:
        held = [*range(4)]  # as many as run at once
        streams = await begin(engine, runner, *map(request_of_50, held))
        waiting = asyncio.ensure_future(events_of(engine.generate(request(7))))
        await until(lambda: engine.status().waiting == 1)
        runner.fail_launch = True
        runner.let_go()
        for stream in streams:
            assert (await events_of(stream))[-1].finish is FinishReason.ERROR
        assert_is_solo(await waiting, request(7))


async def test_a_prefix_is_found_until_the_cache_is_reset() -> None:
    async with serving(GatedRunner()) as engine:
        prompt = replace(request(0, max_tokens=1), prompt=tuple(i % VOCAB for i in range(9)))

        async def cached(number: int) -> int:
            events = await events_of(engine.generate(replace(prompt, id=str(number))))
            return events[0].cached_tokens

        assert [await cached(0), await cached(1)] == [0, 8]
        engine.reset_prefix_cache()
        assert [await cached(2), await cached(3)] == [0, 8]


async def test_a_device_that_cannot_be_reset_fails_the_engine() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        (stream,) = await begin(engine, runner, request_of_50(0))
        runner.fail_launch = runner.fail_reset = True
        runner.let_go()
        *_, end = await events_of(stream)
        assert end.finish is FinishReason.ERROR
        reason = await asyncio.wait_for(engine.failure(), 5)
        assert reason == engine.status().error == "RuntimeError: the device is gone"
        assert engine.status().phase == "failed"
        assert not engine.status().ready
        with pytest.raises(EngineFailed, match="the device is gone"):
            await first(engine.generate(request(1)))


async def test_a_failed_build_raises_from_start() -> None:
    def fail(_: Progress) -> None:
        raise ValueError("the weights are damaged")

    engine = make_engine(GatedRunner(), before=fail)
    with pytest.raises(ValueError, match="the weights are damaged"):
        await engine.start()
    status = engine.status()
    assert (status.phase, status.ready) == ("failed", False)
    assert status.error == "ValueError: the weights are damaged"
    with pytest.raises(EngineFailed, match="damaged"):
        await first(engine.generate(request()))
    await engine.stop()


# Start and stop.


async def test_status_tells_the_phases_of_the_start() -> None:
    going = threading.Event()

    def load(report: Progress) -> None:
        report("loading", 0.25)
        going.wait()

    engine = make_engine(GatedRunner(), before=load)
    status = engine.status()
    assert (status.phase, status.ready, status.total_pages) == ("starting", False, 0)
    starting = asyncio.ensure_future(engine.start())
    await until(lambda: engine.status().phase == "loading")
    assert engine.status().progress == 0.25 and not engine.status().ready
    with pytest.raises(Overloaded, match="loading"):
        await first(engine.generate(request()))
    going.set()
    await starting
    status = engine.status()
    assert (status.phase, status.ready, status.progress) == ("serving", True, 1.0)
    assert status.free_pages == status.total_pages == CACHE.usable_pages
    await engine.stop()


async def test_status_counts_what_runs_and_what_waits() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        streams = await begin(engine, runner, *map(request_of_50, range(4)))
        queued = [asyncio.ensure_future(events_of(engine.generate(request(i)))) for i in (7, 8)]
        await until(lambda: engine.status().waiting == 2)
        assert engine.status().running == 4
        runner.let_go()
        await asyncio.gather(*queued, *map(events_of, streams))
        await until(lambda: is_whole(engine))


async def test_a_held_device_shows_as_the_age_of_the_last_step() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        assert engine.status().last_step_age == 0.0
        runner.hold()
        reader = asyncio.ensure_future(events_of(engine.generate(request())))
        await until(lambda: engine.status().last_step_age > 0.02)
        runner.let_go()
        await reader
        await until(lambda: engine.status().last_step_age == 0.0)


async def test_stop_ends_open_streams_and_nothing_can_start_after_it() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    (stream,) = await begin(engine, runner, request_of_50(0))
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="shutting down"):
        await first(engine.generate(request(1)))
    runner.let_go()
    await stopping
    with pytest.raises(Overloaded, match="shutting down"):
        await events_of(stream)
    with pytest.raises(Overloaded, match="shutting down"):
        await first(engine.generate(request(2)))
    assert engine.num_streams == 0


async def test_an_engine_that_was_never_started_can_be_stopped() -> None:
    engine = make_engine(GatedRunner())
    await engine.stop()
    with pytest.raises(Overloaded):
        await first(engine.generate(request()))
