"""Every request gets its own tokens, in order, however many there are and whoever leaves."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from jaxserve.api import FinishReason, ReaderTooSlow
from jaxserve.engine import engine as engine_module
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled
from jaxserve.step_times import StepTimes
from tests.engine.driver import (
    GatedRunner,
    assert_is_solo,
    begin,
    events_of,
    first,
    is_whole,
    request,
    request_of_50,
    serving,
    until,
)
from tests.scheduler.fake_runner import VOCAB, Pending


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


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who was only late, and had little or waits already, is not."""
    monkeypatch.setattr(engine_module, "_MAX_UNREAD", 20)
    runner = GatedRunner()
    async with serving(runner) as engine:
        unread, late = await begin(
            engine, runner, request(0, max_tokens=60), request(1, max_tokens=15)
        )
        reading = asyncio.ensure_future(events_of(engine.generate(request(2, max_tokens=60))))
        await until(lambda: engine.status().waiting == 1)
        runner.let_go()
        assert_is_solo(await reading, request(2, max_tokens=60))
        await until(lambda: is_whole(engine))
        with pytest.raises(ReaderTooSlow, match="20 tokens and logprobs waited"):
            await events_of(unread)
        assert (await events_of(late))[-1].finish is FinishReason.LENGTH
        assert engine.num_streams == 0


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


async def test_a_reader_that_was_late_gets_all_that_came_meanwhile_at_once() -> None:
    runner = GatedRunner()
    late = request_of_50(0)
    async with serving(runner) as engine:
        runner.hold()
        stream = engine.generate(late)
        reader = asyncio.ensure_future(anext(stream))
        runner.let_one_step_go()
        runner.let_one_step_go()
        events = await reader
        runner.let_go()
        await until(lambda: is_whole(engine))
        together = await anext(stream)
        assert len(together) > 1
        assert_is_solo([*events, *together, *await events_of(stream)], late)


async def test_many_streams_at_once_each_get_their_own() -> None:
    """Sixty requests on four slots."""
    requests = [request(number, max_tokens=1 + number % 12) for number in range(60)]
    metrics = Metrics("tiny")
    async with serving(GatedRunner(), metrics=metrics) as engine:
        streams = [events_of(engine.generate(each)) for each in requests]
        for each, events in zip(requests, await asyncio.gather(*streams), strict=True):
            assert_is_solo(events, each)
        await until(lambda: is_whole(engine))
    counted = b'vllm:request_num_preemptions_count{engine="0",model_name="tiny"} 60.0\n'
    assert counted in metrics.exposition()


async def test_tokens_are_counted_while_their_sequences_run() -> None:
    def counted() -> tuple[float, ...]:
        lines = re.findall(r"^vllm:(?:prompt|generation)_tokens_total.* (.*)$", shown(), re.M)
        return tuple(map(float, lines))

    def shown() -> str:
        return metrics.exposition().decode()

    metrics, runner = Metrics("tiny"), GatedRunner()
    async with serving(runner, metrics=metrics) as engine:
        prompt = tuple(range(20))  # a step computes 16 tokens at most
        runner.hold()
        stream = events_of(engine.generate(replace(request_of_50(0), prompt=prompt)))
        reader = asyncio.ensure_future(stream)
        runner.let_one_step_go()
        assert counted() == (0, 0), "its results are read beside the next step"
        for expected in ((16, 0), (20, 1), (20, 2)):
            runner.let_one_step_go()
            await until(lambda: counted() == expected)  # noqa: B023  (awaited here)
        runner.let_go()
        assert len(await reader) == 44, "up to the longest that a sequence may be"
        assert counted() == (20, 44)


async def test_steps_teach_the_scheduler_how_long_they_take() -> None:
    class Slow(GatedRunner):
        def is_done(self, pending: Pending) -> bool:
            return False

        def collect(self, pending: Pending) -> list[Sampled | None]:
            time.sleep(0.001)
            return super().collect(pending)

    metrics = Metrics("tiny")
    times = StepTimes(decode={4: 1e-6}, mixed={16: 1e-6})
    async with serving(Slow(), metrics=metrics, times=times) as engine:
        assert_is_solo(await events_of(engine.generate(request_of_50(0))), request_of_50(0))
    name = b'jaxserve_step_time_correction_seconds{bucket="4",kind="decode"} '
    (line,) = [line for line in metrics.exposition().splitlines() if line.startswith(name)]
    assert 0 < float(line.rpartition(b" ")[2]) < 0.6e-6, "at most half of the table's time"


async def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    async def impatient(number: int) -> None:
        stream = engine.generate(request(number, max_tokens=50))
        for _ in range(number % 5):
            await anext(stream, None)
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


async def test_a_prefix_is_found_until_the_cache_is_reset() -> None:
    async with serving(GatedRunner()) as engine:
        prompt = replace(request(0, max_tokens=1), prompt=tuple(i % VOCAB for i in range(9)))

        async def cached(number: int) -> int:
            events = await events_of(engine.generate(replace(prompt, id=str(number))))
            return events[0].cached_tokens

        assert [await cached(0), await cached(1)] == [0, 8]
        engine.reset_prefix_cache()
        assert [await cached(2), await cached(3)] == [0, 8]


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
            assert (await events_of(stream))[-1].finish is FinishReason.LENGTH
        await until(lambda: is_whole(engine))
        assert request(9).params not in runner.params
