"""A failed step costs its own requests; a failed device ends the engine, which says why."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxserve.api import Ahead, EngineFailed, FinishReason, GuideError, GuideState, TokenEvent
from jaxserve.engine.engine import Progress
from jaxserve.engine.loop import StepLoop
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.transfers import MovesFailed
from tests.engine.driver import (
    CACHE,
    SCHEDULER,
    GatedRunner,
    assert_is_solo,
    begin,
    events_of,
    first,
    is_whole,
    make_engine,
    request,
    request_of_50,
    serving,
    until,
)
from tests.scheduler.fake_runner import Pending, solo


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


async def test_moves_of_pages_that_failed_end_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, turns = Scheduler.poll_host, itertools.count()

    def poll_host(scheduler: Scheduler) -> None:
        if scheduler.num_running == 2 and next(turns) == 10:
            raise MovesFailed("pages were not moved")
        poll(scheduler)

    monkeypatch.setattr(Scheduler, "poll_host", poll_host)
    runner = GatedRunner()
    async with serving(runner) as engine:
        streams = await begin(engine, runner, *map(request_of_50, range(2)))
        runner.let_go()
        for number, stream in enumerate(streams):
            later = await events_of(stream)  # `begin` took the first ones
            tokens, reason = solo(request_of_50(number), SCHEDULER, CACHE)
            assert len(later) > 20 and later[-1].finish is reason
            assert [event.token for event in later] == tokens[-len(later) :]
        assert runner.num_resets == 1 and "sequences are recomputed" in caplog.text
        await until(lambda: is_whole(engine))


async def test_who_ended_before_a_result_could_not_be_taken_is_told_so() -> None:
    class Faulty:
        ready, mask, following, error = True, b"\xff" * 4, None, None
        ahead = Ahead()

        def start(self) -> Faulty:
            return self

        def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
            raise RuntimeError("no such token")

        def wait(self, timeout: float) -> bool:
            return True

    runner = GatedRunner()
    async with serving(runner) as engine:
        (other,) = await begin(engine, runner, request_of_50(2))
        requests = request(0, max_tokens=1), request(1, guide=Faulty())
        ending, failing = (asyncio.ensure_future(events_of(engine.generate(r))) for r in requests)
        await until(lambda: engine.status().waiting == 2)
        runner.let_go()
        assert_is_solo(await asyncio.wait_for(ending, 5), requests[0])
        assert (await failing)[-1] == TokenEvent("r1", None, FinishReason.ERROR)
        assert (await events_of(other))[-1] == TokenEvent("r2", None, FinishReason.ERROR)
        await until(lambda: is_whole(engine))


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
async def test_a_request_that_cannot_be_queued_ends_alone(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Unready:
        def start(self) -> GuideState:
            raise ZeroDivisionError

    runner, metrics = GatedRunner(), Metrics("tiny")
    async with serving(
        runner, scheduler=replace(SCHEDULER, policy=policy), metrics=metrics
    ) as engine:
        (other,) = await begin(engine, runner, request_of_50(2))
        runner.let_go()
        unready = request(0, guide=Unready())
        assert await events_of(engine.generate(unready)) == [
            TokenEvent("r0", None, FinishReason.ERROR)
        ]
        assert "request r0 could not be queued" in caplog.text
        assert (await events_of(other))[-1].finish is FinishReason.LENGTH
        assert_is_solo(await events_of(engine.generate(request(0))), request(0))
        await until(lambda: is_whole(engine))
    assert b"jaxserve_step_errors_total 1.0\n" in metrics.exposition()


async def test_logits_that_are_no_numbers_count_as_an_error() -> None:
    class Spoiled(GatedRunner):
        def collect(self, pending: Pending) -> list[Sampled | None]:
            return [Sampled(None) for _ in super().collect(pending)]

    metrics = Metrics("tiny")
    async with serving(Spoiled(), metrics=metrics) as engine:
        assert await events_of(engine.generate(request(0))) == [
            TokenEvent("r0", None, FinishReason.ERROR)
        ]
    assert b"jaxserve_step_errors_total 1.0\n" in metrics.exposition()


@pytest.mark.parametrize(("finish", "errors"), [(FinishReason.GRAMMAR, 0), (FinishReason.ERROR, 1)])
async def test_a_grammar_at_its_limit_is_no_error_and_a_mask_that_cannot_be_computed_is(
    finish: FinishReason, errors: int
) -> None:
    class Left:
        ready, mask, following = True, b"\xff" * 4, None
        error: GuideError | None = None
        ahead = Ahead()

        def start(self) -> Left:
            return self

        def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
            self.error = GuideError("why", finish)

        def wait(self, timeout: float) -> bool:
            return True

    metrics = Metrics("tiny")
    async with serving(GatedRunner(), metrics=metrics) as engine:
        *_, end = await events_of(engine.generate(request(0, guide=Left())))
        assert end == TokenEvent("r0", None, finish)
        await until(lambda: is_whole(engine))
    shown = metrics.exposition()
    assert f"jaxserve_step_errors_total {errors}.0\n".encode() in shown
    assert b'vllm:request_num_preemptions_count{engine="0",model_name="tiny"} 0.0\n' in shown


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


async def test_a_thread_that_dies_before_its_start_was_heard_of_fails_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(_: object) -> None:
        raise RuntimeError("at once")

    monkeypatch.setattr(StepLoop, "run", die)
    threads: list[threading.Thread] = []
    engine = make_engine(GatedRunner(), before=lambda _: threads.append(threading.current_thread()))
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    while not threads:
        time.sleep(0.001)
    threads[0].join(5)  # the event loop is held meanwhile
    await starting
    assert await asyncio.wait_for(engine.failure(), 5) == "RuntimeError: at once"
    assert not engine.status().ready


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
