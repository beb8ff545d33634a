"""The official client's view: what it sends is understood, what it gets back parses."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxserve.api import Overloaded
from tests.fakes import END_THINK, IM_END, THINK, FakeEngine
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

USER: Any = [{"role": "user", "content": "Hi"}]


async def test_models_are_listed_and_retrieved(serve: Serve) -> None:
    async with client(serve, FakeEngine()) as api:
        assert [model.id async for model in api.models.list()] == [MODEL, "alias"]
        assert (await api.models.retrieve("alias")).root == MODEL
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")


async def test_a_chat_is_answered_whole(serve: Serve) -> None:
    engine = FakeEngine([*b"Hello", IM_END], cached_tokens=3)
    async with client(serve, engine) as api:
        reply = await api.chat.completions.create(model=MODEL, messages=USER)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(engine.requests[0].prompt) > len("Hi")
    assert reply.usage.completion_tokens == 6, "the stop token counts"
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_chat_is_streamed_with_its_usage_at_the_end(serve: Serve) -> None:
    async with client(serve, FakeEngine([*b"Hello", IM_END])) as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert texts == ["H", "e", "l", "l", "o", ""]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 6 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 6
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_streaming_helpers_of_the_client_work(serve: Serve) -> None:
    async with (
        client(serve, FakeEngine([*b"Hello", IM_END])) as api,
        api.chat.completions.stream(model=MODEL, messages=USER) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_several_prompts_and_choices_keep_their_places(
    serve: Serve, stream: bool
) -> None:
    engine = FakeEngine(lambda request: [*request.prompt, *b"!"])
    async with client(serve, engine) as api:
        reply = await api.completions.create(
            model=MODEL, prompt=["ab", "cde"], n=2, stream=stream, max_tokens=10
        )
        texts = {0: "", 1: "", 2: "", 3: ""}
        replies = [chunk async for chunk in reply] if stream else [reply]
        for choice in (choice for chunk in replies for choice in chunk.choices):
            texts[choice.index] += choice.text
    assert texts == {0: "ab!", 1: "ab!", 2: "cde!", 3: "cde!"}


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_all_four_forms_of_a_prompt_mean_the_same(serve: Serve, prompt: Any) -> None:
    engine = FakeEngine(b"x")
    async with client(serve, engine) as api:
        reply = await api.completions.create(model=MODEL, prompt=prompt, echo=True)
    assert engine.requests[0].prompt == (97, 98)
    assert engine.requests[0].params.max_tokens == 16, "OpenAI's default"
    assert reply.choices[0].text == "abx"
    assert reply.choices[0].finish_reason == "length"


async def test_each_choice_gets_its_own_seed_and_the_same_one_again(serve: Serve) -> None:
    engine = FakeEngine()
    async with client(serve, engine) as api:
        for seed in (7, 7, 8, None):
            await api.completions.create(model=MODEL, prompt="a", n=2, seed=seed)
    seeds = [request.params.seed for request in engine.requests]
    assert seeds[0:2] == seeds[2:4]
    assert len(set(seeds[2:])) == 6
    assert all(0 <= seed < 2**32 for seed in seeds)


async def test_chat_logprobs_come_with_each_token(serve: Serve) -> None:
    async with client(serve, FakeEngine([*b"ab", IM_END])) as api:
        reply = await api.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2
        )
    entries = reply.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a", "b"], "not the stop token, which is hidden"
    assert entries[0].bytes == [97]
    assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [
        ("a", -0.5),
        ("b", -1.5),
    ]


async def test_completion_logprobs_have_the_older_shape(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"ab")) as api:
        reply = await api.completions.create(model=MODEL, prompt="x", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}]
    assert logprobs.text_offset == [0, 1]


async def test_thoughts_are_kept_apart_from_the_answer(serve: Serve) -> None:
    script = [THINK, *b"\nhm\n", END_THINK, *b"\n\nYes", IM_END]
    async with client(serve, FakeEngine(script)) as api:
        reply = await api.chat.completions.create(model=MODEL, messages=USER)
        message = reply.choices[0].message
        assert (message.content, message.reasoning, message.reasoning_content) == (
            "Yes",
            "hm",
            "hm",
        )
        assert 3 <= reply.usage.completion_tokens_details.reasoning_tokens <= 5
        stream = await api.chat.completions.create(model=MODEL, messages=USER, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Yes"


async def test_tool_calls_are_read_from_the_answer(serve: Serve) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    engine = FakeEngine([*text.encode(), IM_END])
    async with client(serve, engine) as api:
        reply = await api.chat.completions.create(model=MODEL, messages=USER, tools=tools)
        call = reply.choices[0].message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.choices[0].message.content is None
        async with api.chat.completions.stream(model=MODEL, messages=USER, tools=tools) as stream:
            final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert b'"name": "add", "parameters"' in bytes(t for t in engine.requests[0].prompt if t < 256)


async def test_overload_is_a_rate_limit_error_that_says_when_to_retry(serve: Serve) -> None:
    engine = FakeEngine(refuse=Overloaded("the queue is full"))
    async with client(serve, engine) as api:
        with pytest.raises(openai.RateLimitError) as caught:
            await api.chat.completions.create(model=MODEL, messages=USER, stream=True)
    headers = caught.value.response.headers
    # Nothing was served yet, so no rate is known; test_limits.py has the others.
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("5", "5000")


async def test_a_failure_in_mid_stream_reaches_the_client_as_an_error(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"Hello", fail_after=2)) as api:
        stream = await api.completions.create(model=MODEL, prompt="a", stream=True)
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="could not finish") as caught:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
    assert texts == ["H", "e"]
    assert "secret" not in str(caught.value)
