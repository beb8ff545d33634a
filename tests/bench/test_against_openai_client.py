"""The harness and OpenAI's own client time the same traffic on the same server alike."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import openai
import pytest

from jaxserve.bench.experiment import run_experiment
from jaxserve.bench.options import Experiment
from tests.bench.mock_server import Course, Mock, serving
from tests.bench.virtual_time import at_virtual_time

COURSES = [Course(ttft=0.5 + 0.01 * n, gap=0.06 + 0.002 * n, tokens=5, chat=True) for n in range(9)]

WARM_UP: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "warm-up"}],
    "stream": True,
}


class Timed(NamedTuple):
    """Seconds."""

    ttft: float
    tpot: float


@at_virtual_time
async def test_ttft_and_tpot_are_those_of_another_client() -> None:
    numbers: dict[str, int] = {}

    def course(body: dict[str, Any], _: int) -> Course:
        """Equal prompts have equal courses; a warm-up has none."""
        if body["messages"] == WARM_UP["messages"]:
            return Course(ttft=0.0, tokens=1, chat=True)
        return COURSES[numbers.setdefault(str(body["messages"]), len(numbers))]

    async with serving(course) as mock:
        experiment = Experiment(
            url=mock.url, endpoint="chat", prompts="text", traffic="fixed", input_tokens=8,
            output_tokens=5, duration=0.3, rate=30, burstiness=float("inf"), model="mock",
            warmup=0.0, cooldown=0.0, drain=5.0,
        )  # fmt: skip
        point = await run_experiment(experiment, lambda run: nullcontext())
        assert len(point["requests"]) == len(COURSES)
        theirs = await by_openai(mock, [request["intended"] for request in point["requests"]])
    ours = point["summary"]["total"]
    ttft, tpot = (1e3 * median(times) for times in zip(*theirs, strict=True))
    assert ours["ttft_ms_of_completed"]["p50"] == pytest.approx(ttft, abs=0.01)
    assert ours["tpot_ms_of_completed"]["p50"] == pytest.approx(tpot, abs=0.01)


async def by_openai(mock: Mock, times: list[float]) -> list[Timed]:
    """The bodies that the mock was sent before, again at the same times."""
    bodies = [dict(body) for body in mock.bodies]
    for body in bodies:
        body["extra_body"] = {"ignore_eos": body.pop("ignore_eos")}
    clock = asyncio.get_running_loop().time
    async with openai.AsyncOpenAI(base_url=f"{mock.url}/v1", api_key="k", max_retries=0) as api:

        async def one(body: dict[str, Any], when: float) -> Timed:
            await asyncio.sleep(max(0.0, when - clock()))
            sent, arrivals, tokens = clock(), list[float](), 0
            async for chunk in await api.chat.completions.create(**body):
                if chunk.choices and chunk.choices[0].delta.content:
                    arrivals.append(clock())
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return Timed(arrivals[0] - sent, (arrivals[-1] - arrivals[0]) / (tokens - 1))

        async for _ in await api.chat.completions.create(**WARM_UP):
            pass  # what the client does once only, as its imports
        start = clock()
        return await asyncio.gather(*map(one, bodies, [start + when for when in times]))
