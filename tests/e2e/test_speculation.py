"""A server that verifies drafts answers as one that does not, and takes fewer steps."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest

from tests.e2e.believed_times import believe_that_drafts_pay
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


OFTEN = ("greedy", "seeded", "choices", "a grammar")
"""Alone on a server that may decide against drafts; beside each other all are asked."""
LOOKING_UP = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 2}')


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    with Server(*LOOKING_UP) as running:
        yield running


async def answers(server: Server, names: list[str]) -> list[dict[str, Any]]:
    """What each of the requests gets; all are sent at once."""

    async def ask(session: aiohttp.ClientSession, name: str) -> dict[str, Any]:
        body = {"model": "m", "prompt": COUNTED, "max_tokens": 50, **REQUESTS[name]}
        body["model"] = "jaxserve-embedded"
        async with session.post(f"{server.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return {"choices": choices, "usage": answer["usage"]["completion_tokens"]}

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, name) for name in names))


ALONE: dict[str, str] = {}
"""What requests get from the server without drafts, which two tests ask for."""


async def without_drafts(server: Server, name: str) -> dict[str, Any]:
    if name not in ALONE:
        ALONE[name] = json.dumps((await answers(server, [name]))[0])
    return json.loads(ALONE[name])


def assert_same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer["usage"] == expected["usage"]
    for one, other in zip(answer["choices"], expected["choices"], strict=True):
        logprobs = [choice.pop("logprobs", None) for choice in (one, other)]
        assert one == other
        if logprobs[0] is not None:
            ours, theirs = (each["token_logprobs"] for each in logprobs)
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert logprobs[0]["tokens"] == logprobs[1]["tokens"]


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in REQUESTS],
)
async def test_an_answer_is_the_one_without_drafts(
    server: Server, drafting: Server, name: str
) -> None:
    (answer,), expected = await answers(drafting, [name]), await without_drafts(server, name)
    assert_same(answer, expected)


async def test_answers_beside_each_other_are_those_without_drafts(
    server: Server, drafting: Server
) -> None:
    names = list(REQUESTS)
    expected = await answers(server, names)
    for answer, other in zip(await answers(drafting, names), expected, strict=True):
        assert_same(answer, other)


@pytest.fixture(scope="module")
def hopeful(drafting: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each step with a draft is a verify step."""
    folder = tmp_path_factory.mktemp("cache")
    for file in (Path.home() / ".cache" / "jaxserve" / "executables").glob("*/step_times.json"):
        times = json.loads(file.read_text())
        if times["verify"] and (list(times["decode"]), list(times["mixed"])) == (["8"], ["128"]):
            shutil.copytree(file.parent, folder / "executables" / file.parent.name)
    believe_that_drafts_pay(folder)
    with Server(*LOOKING_UP, "--cache-dir", str(folder)) as running:
        yield running


class Counts(NamedTuple):
    """Of a server, since it started."""

    rows: float
    drafts: float
    accepted: float
    decode_steps: float
    verify_steps: float

    @classmethod
    async def of(cls, server: Server) -> Counts:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        totals = [await server.metric(f"vllm:spec_decode_num_{name}_total") for name in names]
        steps = await server.samples("jaxserve_step_seconds_count")
        kinds = ("decode", "verify")
        return cls(
            *totals,
            *(sum(n for key, n in steps.items() if f'kind="{kind}"' in key) for kind in kinds),
        )

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - old for now, old in zip(self, before, strict=True)))


async def test_text_that_repeats_takes_fewer_steps(server: Server, hopeful: Server) -> None:
    (expected,), before = await answers(server, ["greedy"]), await Counts.of(hopeful)
    (answer,) = await answers(hopeful, ["greedy"])
    found = (await Counts.of(hopeful)).since(before)
    assert_same(answer, expected)
    assert found.accepted > 2 * found.rows > 0
    assert found.decode_steps + found.verify_steps < 25, "of 49 tokens after the first"
    assert await hopeful.metric('jaxserve_compiles_total{phase="serving"}') == 0


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_an_answer_with_drafts_in_each_step_is_the_one_without(
    server: Server, hopeful: Server, name: str
) -> None:
    (answer,), expected = await answers(hopeful, [name]), await without_drafts(server, name)
    assert_same(answer, expected)


async def test_a_grammar_takes_fewer_steps(server: Server, hopeful: Server) -> None:
    """What it leaves no choice about is drafted, though it never came before."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("temperature", "wavelength")},
        "required": ["temperature", "wavelength"],
        "additionalProperties": False,
    }
    asked: Any = {
        "model": "jaxserve-embedded",
        "messages": [{"role": "user", "content": "How warm is it?"}],
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    before, texts = await Counts.of(hopeful), list[str | None]()
    for each in (server, hopeful):
        async with openai.AsyncOpenAI(base_url=f"{each.url}/v1", api_key="none") as api:
            reply = await api.chat.completions.create(**asked)
            texts.append(reply.choices[0].message.content)
    found = (await Counts.of(hopeful)).since(before)
    assert texts[0] == texts[1]
    assert found.accepted >= 4 and found.rows > 0


async def test_a_prediction_that_comes_true_takes_few_steps(
    server: Server, hopeful: Server
) -> None:
    asked: Any = {
        "model": "jaxserve-embedded",
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "max_tokens": 40,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body: Any = {"extra_body": {"chat_template_kwargs": asked.pop("chat_template_kwargs")}}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        plain = await api.chat.completions.create(**asked, **body)
    text = plain.choices[0].message.content or ""
    before = await Counts.of(hopeful)
    async with openai.AsyncOpenAI(base_url=f"{hopeful.url}/v1", api_key="none") as api:
        reply = await api.chat.completions.create(
            **asked, **body, prediction={"type": "content", "content": text}
        )
    found = (await Counts.of(hopeful)).since(before)
    assert reply.choices[0].message.content == text
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    details = reply.usage.completion_tokens_details
    accepted, length = details.accepted_prediction_tokens, reply.usage.completion_tokens
    assert accepted is not None and accepted + 1 >= length > 20, "all but the end token"
    assert details.rejected_prediction_tokens == 0
    assert found.decode_steps + found.verify_steps <= length / 2


async def test_counts_of_drafts_agree(hopeful: Server) -> None:
    """Under vLLM's names. A draft is accepted only after those before it."""
    await answers(hopeful, ["greedy"])
    places = await hopeful.samples("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    by_place = [n for _, n in sorted(places.items())]
    counts = await Counts.of(hopeful)
    assert len(by_place) == 7 and by_place == sorted(by_place, reverse=True)
    assert 0 < sum(by_place) == counts.accepted <= counts.drafts
    assert by_place[0] <= counts.rows <= counts.drafts


async def test_a_server_without_drafts_counts_none(server: Server) -> None:
    assert await server.metric("vllm:spec_decode_num_drafts_total") == 0
