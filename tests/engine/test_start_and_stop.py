"""What the engine tells of itself from its start to its end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from jaxserve.api import EngineLimits, Overloaded
from jaxserve.engine.engine import Progress
from jaxserve.scheduler import Scheduler
from tests.engine.driver import (
    CACHE,
    SCHEDULER,
    GatedRunner,
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
from tests.scheduler.fake_runner import VOCAB


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


async def test_a_context_shorter_than_the_model_s_is_known_once_it_serves() -> None:
    before = EngineLimits(max_model_len=40_960, vocab_size=VOCAB, sampled_vocab=3)
    engine = make_engine(GatedRunner(), limits=before)
    assert engine.limits == before
    await engine.start()
    assert engine.limits == before._replace(max_model_len=SCHEDULER.max_model_len)
    await engine.stop()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each time that the scheduler's accounts were gone through."""
    done: list[str] = []
    monkeypatch.setattr(Scheduler, "check", lambda _: done.append("checked"))
    return done


async def test_accounts_are_gone_through_once_nothing_has_come_for_a_while(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.engine.loop._QUIET", 0.0)
    async with serving(GatedRunner()) as engine:
        await until(lambda: len(checks) == 1)
        await events_of(engine.generate(request()))
        await until(lambda: len(checks) >= 2)


async def test_the_next_request_does_not_wait_for_the_accounts(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.engine.loop._QUIET", 3600.0)
    async with serving(GatedRunner()) as engine:
        for number in range(5):
            await events_of(engine.generate(request(number)))
        await until(lambda: is_whole(engine))
    assert not checks


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


async def test_who_leaves_does_not_count_as_waiting() -> None:
    runner = GatedRunner()
    async with serving(runner) as engine:
        streams = await begin(engine, runner, *map(request_of_50, range(4)))
        for stream in streams:
            await stream.aclose()
        engine.reset_prefix_cache()
        assert engine.status().waiting == 0
        runner.let_go()
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


async def test_the_first_step_after_a_rest_is_not_as_old_as_the_rest() -> None:
    """A server that nobody used for long would not be healthy while it launches that step."""
    runner = GatedRunner()
    async with serving(runner) as engine:
        await asyncio.sleep(0.05)
        runner.hold()
        asked = time.monotonic()
        reader = asyncio.ensure_future(events_of(engine.generate(request())))
        await until(lambda: runner.held)
        assert 0 < engine.status().last_step_age <= time.monotonic() - asked
        runner.let_go()
        await reader


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


async def test_stop_reads_the_step_in_flight() -> None:
    """The device must be idle when the process ends."""
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    (stream,) = await begin(engine, runner, request_of_50(0))
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    runner.let_go()
    await stopping
    assert runner.collected == runner.launched
    await stream.aclose()
