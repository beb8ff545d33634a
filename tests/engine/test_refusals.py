"""What the engine does not take, it says at once, and the others go on."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.api import Overloaded, Rejected, Request, SamplingParams
from jaxserve.config import SchedulerConfig
from tests.engine.driver import (
    GatedRunner,
    assert_is_solo,
    begin,
    events_of,
    first,
    request,
    request_of_50,
    serving,
    until,
)


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
