"""A server that verifies drafts answers as one that does not, and takes fewer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.process import Server

COUNTED = "One two three four. One two three four. One two three four. One two"
"""The embedded model goes on counting, so that looking up is right for long."""
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 0.7, "top_p": 0.9},
    "penalised": {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "repeating itself": {"seed": 3, "frequency_penalty": -1.0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "a stop string": {"temperature": 0, "stop": ["four One two three"], "max_tokens": 60},
    "a stop that is shown": {"temperature": 0, "stop": "three", "include_stop_str_in_output": True},
    "a least length": {"temperature": 0, "min_tokens": 30, "stop": ["four"]},
    "a limit": {"temperature": 0, "max_tokens": 17},
    "choices": {"seed": 8, "temperature": 0.8, "n": 2},
    "a bias": {"temperature": 0, "logit_bias": {"40": 2.0}},
    "a grammar": {"temperature": 0, "structured_outputs": {"regex": "( one| two| six){20}"}},
}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    with Server("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 2}') as running:
        yield running


async def answers(server: Server, names: list[str]) -> list[dict[str, Any]]:
    """What each of the requests gets; all are sent at once."""

    async def ask(session: aiohttp.ClientSession, name: str) -> dict[str, Any]:
        body = {"model": "m", "prompt": COUNTED, "max_tokens": 80, **REQUESTS[name]}
        body["model"] = "jaxserve-embedded"
        async with session.post(f"{server.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return {"choices": choices, "usage": answer["usage"]["completion_tokens"]}

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, name) for name in names))


def assert_same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer["usage"] == expected["usage"]
    for one, other in zip(answer["choices"], expected["choices"], strict=True):
        logprobs = [choice.pop("logprobs", None) for choice in (one, other)]
        assert one == other
        if logprobs[0] is not None:
            ours, theirs = (each["token_logprobs"] for each in logprobs)
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert logprobs[0]["tokens"] == logprobs[1]["tokens"]


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_an_answer_is_the_one_without_drafts(
    server: Server, drafting: Server, name: str
) -> None:
    (expected,), (answer,) = await answers(server, [name]), await answers(drafting, [name])
    assert_same(answer, expected)


async def test_answers_beside_each_other_are_those_without_drafts(
    server: Server, drafting: Server
) -> None:
    names = list(REQUESTS) * 2
    expected = await answers(server, names)
    for answer, other in zip(await answers(drafting, names), expected, strict=True):
        assert_same(answer, other)


@pytest.mark.slow  # step times that the start measured decide: on a busy machine nothing is drafted
async def test_text_that_repeats_takes_fewer_steps(drafting: Server) -> None:
    async def counts() -> list[float]:
        names = ("accepted_tokens", "drafts")
        totals = [await drafting.metric(f"vllm:spec_decode_num_{name}_total") for name in names]
        steps = 'jaxserve_step_seconds_count{bucket="8",kind="decode"}'
        return [*totals, await drafting.metric(steps)]

    before = await counts()
    await answers(drafting, ["greedy"])
    accepted, rows, steps = (now - old for now, old in zip(await counts(), before, strict=True))
    assert accepted > 2 * rows > 0
    assert steps < 40, "of 79 tokens after the first"
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0


async def test_a_server_without_drafts_counts_none(server: Server) -> None:
    assert await server.metric("vllm:spec_decode_num_drafts_total") == 0
