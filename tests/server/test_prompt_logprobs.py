"""Logprobs of the prompt: OpenAI's echo, vLLM's prompt_logprobs, and how lm-eval asks for them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.fakes import FakeEngine
from tests.server.conftest import Serve

ABC = [97, 98, 99]


async def complete(url: str, **fields: Any) -> Any:
    async with aiohttp.request("POST", f"{url}/v1/completions", json=fields) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_the_request_of_lm_eval_scores_every_token_of_the_prompt(serve: Serve) -> None:
    """It cuts the generated token off with `[context:-1]`, so that one must have its place."""
    for script in (b"!", [257]):  # the second is the end of the sequence
        url = await serve(FakeEngine(script))
        body = await complete(
            url, prompt=[ABC, [97, 98]], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
        )
        first, second = body["choices"]
        logprobs = first["logprobs"]
        assert logprobs["tokens"][:-1] == ["a", "b", "c"]
        assert logprobs["token_logprobs"] == [None, -0.75, -0.75, -0.5]
        assert logprobs["top_logprobs"][:-1] == [
            None,
            {"c": -0.25, "b": -0.75},
            {"d": -0.25, "c": -0.75},
        ]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert len(second["logprobs"]["token_logprobs"]) == 3
        assert first["text"].startswith("abc")


async def test_a_prompt_can_be_scored_without_generating_anything(serve: Serve) -> None:
    engine = FakeEngine(b"!!!")
    body = await complete(await serve(engine), prompt="abc", echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.75, -0.75]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.75}
    assert body["usage"]["completion_tokens"] == 0
    assert engine.requests[0].params.max_tokens == 1


async def test_without_echo_something_has_to_be_generated(serve: Serve) -> None:
    url = await serve(FakeEngine())
    body = {"prompt": "a", "max_tokens": 0}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "max_tokens"


async def test_a_stream_begins_with_the_logprobs_of_its_prompt(serve: Serve) -> None:
    url = await serve(FakeEngine(b"xy"))
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "stream": True}
    parts = []
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["logprobs"])
    assert [part["tokens"] for part in parts] == [["a", "b", "c", "x"], ["y"]]
    assert [part["text_offset"] for part in parts] == [[0, 1, 2, 3], [4]]


async def test_prompt_logprobs_are_by_token_id_with_ranks(serve: Serve) -> None:
    url = await serve(FakeEngine(b"x"))
    expected = {
        "98": {"logprob": -0.75, "rank": 2, "decoded_token": "b"},
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
    }
    body = await complete(url, prompt="ab", prompt_logprobs=2, n=2)
    for choice in body["choices"]:
        assert choice["prompt_logprobs"] == [None, expected]
        assert choice["logprobs"] is None
    chat = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=chat) as reply:
        shown = (await reply.json())["prompt_logprobs"]
    assert shown[0] is None and [len(entry) for entry in shown[1:]] == [1] * (len(shown) - 1)
    assert "prompt_logprobs" not in (await complete(url, prompt="ab"))["choices"][0]
