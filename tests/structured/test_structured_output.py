"""Structured output end to end: HTTP, engine thread, device. The model is random, so whatever is
valid is so because of the masks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import jsonschema
import pytest

from jaxserve.api import EngineLimits
from jaxserve.engine.engine import AsyncEngine
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.runner.runner import Runner
from jaxserve.scheduler import Scheduler
from jaxserve.tokenizer import HfTokenizer, Tokenizer
from jaxserve_checkpoints.resolve import embedded_model
from tests.server.conftest import serving
from tests.tiny_model import COMPILES, make_config, make_runner, tiny_spec

TOKENIZER: Tokenizer = HfTokenizer.from_folder(embedded_model())
CONFIG = make_config(
    spec=tiny_spec(vocab_size=2048),
    sampled_vocab=TOKENIZER.vocab_size,
    max_num_seqs=4,
    max_model_len=512,
    num_pages=200,
    page_size=8,
    decode=(4,),
    prefill=(32,),
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
NO_SPACE = {
    str(token): -50
    for token in range(TOKENIZER.vocab_size)
    if not TOKENIZER.token_bytes(token).strip() or token in TOKENIZER.special_ids
}
"""A random model likes white space no less than anything else: JSON would be long."""
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner(CONFIG)


@pytest.fixture
async def url(runner: Runner) -> AsyncIterator[str]:
    runner.reset()
    engine = AsyncEngine(
        build=lambda progress: Parts(Scheduler(CONFIG.scheduler, CONFIG.cache), runner),
        limits=EngineLimits(CONFIG.scheduler.max_model_len, CONFIG.spec.vocab_size),
        metrics=Metrics("tiny"),
    )
    await engine.start()
    before = COMPILES.count
    async with serving(engine, tokenizer=TOKENIZER) as address:
        yield address
    await engine.stop()
    assert COMPILES.count == before, "something was compiled while serving"


async def post(url: str, path: str, **fields: Any) -> Any:
    async with aiohttp.request("POST", url + path, json=fields) as reply:
        assert reply.status == 200, await reply.text()
        return (await reply.json())["choices"][0]


async def chat(url: str, seed: int, **fields: Any) -> Any:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 1.0,
        "max_tokens": 150,
        "logit_bias": NO_SPACE,
    }
    return await post(url, "/v1/chat/completions", seed=seed, **{**body, **fields})


async def test_bad_words_are_not_generated(url: str) -> None:
    """Neither as one token nor as two."""
    asked = {"prompt": [5, 6, 7], "max_tokens": 30, "seed": 3, "ignore_eos": True}
    ids = (await post(url, "/v1/completions", return_token_ids=True, **asked))["token_ids"]
    pairs = (
        "".join(TOKENIZER.token_bytes(i).decode("utf-8", "replace") for i in ids[at : at + 2])
        for at in range(len(ids))
    )
    bad = [text for text in pairs if text.isalpha() and len(TOKENIZER.encode(text)) == 2][:1]
    words = (TOKENIZER.token_bytes(token).decode("utf-8", "replace") for token in ids)
    bad += [text for text in words if text.isalpha() and len(TOKENIZER.encode(text)) == 1][-2:]
    assert len(bad) == 3
    text = (await post(url, "/v1/completions", bad_words=bad, **asked))["text"]
    assert text and not any(word in text for word in bad)


async def test_a_thought_ends_with_its_budget(url: str) -> None:
    opens, closes = (TOKENIZER.markers[marker] for marker in ("<think>", "</think>"))
    asked = {"prompt": [5, opens], "max_tokens": 9, "seed": 3, "return_token_ids": True}
    free = (await post(url, "/v1/completions", ignore_eos=True, **asked))["token_ids"]
    cut = (await post(url, "/v1/completions", thinking_token_budget=4, **asked))["token_ids"]
    assert closes not in free
    assert cut[:4] == free[:4] and cut[4] == closes and len(cut) > 5


async def test_json_of_a_schema_beside_free_text(url: str) -> None:
    """Constrained and free requests share steps; the free ones get what they get alone."""
    fields = {"response_format": FORM, "reasoning_effort": "none"}
    free = {"prompt": [5, 6, 7], "max_tokens": 40, "seed": 3, "ignore_eos": True}
    alone = await post(url, "/v1/completions", **free)
    together = await asyncio.gather(
        *(chat(url, seed, **fields) for seed in range(8)),
        *(post(url, "/v1/completions", **free) for _ in range(4)),
    )
    for choice in together[:8]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert [choice["text"] for choice in together[8:]] == [alone["text"]] * 4
    contents = [choice["message"]["content"] for choice in together[:8]]
    assert len(set(contents)) == 8
    for seed in (0, 5):
        again = await chat(url, seed, **fields)
        assert again["message"]["content"] == contents[seed], "it is not what it gets alone"


async def test_forced_calls_are_valid_and_thinking_comes_before(url: str) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        answer = await chat(
            url,
            1,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            logit_bias={**NO_SPACE, str(TOKENIZER.markers["</think>"]): 8},
        )
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["name"], answer["finish_reason"]) == ("look_up", reason)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


async def test_constraints_with_other_parameters(url: str) -> None:
    """Stop tokens kept away, penalties, greedy choice, several choices: still of the grammar."""
    for fields in (
        {"temperature": 0},
        {"min_tokens": 60},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"top_k": 1, "logit_bias": {str(TOKENIZER.encode("a")[0]): 100}},
        {"ignore_eos": True},
    ):
        choice = await post(
            url,
            "/v1/completions",
            prompt=[9],
            guided_choice=["Bern", "Oslo", "Basel"],
            **{"max_tokens": 80, "seed": 1, **fields},
        )
        assert choice["text"] in ("Bern", "Oslo", "Basel"), fields
        assert choice["finish_reason"] == "stop", fields


async def test_a_stream_is_the_answer_in_parts(url: str) -> None:
    body = {
        "prompt": [9],
        "regex": "[a-f]{3}-[0-9]{2}",
        "seed": 4,
        "temperature": 1.0,
        "stream": True,
    }
    text = ""
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == (await post(url, "/v1/completions", **{**body, "stream": False}))["text"]
    assert len(text) == 6


async def test_a_grammar_that_meets_a_limit_is_the_requests_fault(url: str) -> None:
    """It is compiled in no time; each letter multiplies the ways to read those before it."""
    fields = {
        "prompt": [5],
        "max_tokens": 400,
        "min_tokens": 400,
        "regex": "((a{1,100}){1,100}){1,100}",
    }
    async with aiohttp.request("POST", f"{url}/v1/completions", json=fields) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (400, "grammar_limit")
    assert re.match(r"the grammar met a limit after \d+ tokens", error["message"])
    assert (await chat(url, 1, response_format=FORM, reasoning_effort="none"))["message"]["content"]
