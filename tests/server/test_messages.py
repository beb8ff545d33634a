"""The official client of the Messages API: what it sends is understood, what it gets parses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest

from jaxserve.api import Overloaded
from jaxserve.tokenizer import decode
from tests.fakes import END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve

USER: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"name": "add", "description": "Adds", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@asynccontextmanager
async def client(serve: Serve, engine: FakeEngine) -> AsyncIterator[Any]:
    url = await serve(engine)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def prompt_of(engine: FakeEngine) -> str:
    return decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)


async def test_a_message_is_answered(serve: Serve) -> None:
    engine = FakeEngine([*b"Hello", IM_END], cached_tokens=3)
    async with client(serve, engine) as api:
        reply = await api.messages.create(
            model=MODEL,
            max_tokens=20,
            messages=USER,
            system="Be brief",
            extra_body={"temperature": 0.5},
        )
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert [block.model_dump() for block in reply.content] == [
        {"type": "text", "text": "Hello", "citations": None}
    ]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.cache_read_input_tokens == 3
    assert reply.usage.input_tokens == len(engine.requests[0].prompt) - 3
    assert reply.usage.output_tokens == 6
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature) == (20, 0.5)
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBe brief<|im_end|>")
    assert prompt.endswith("</think>\n\n"), "thinking is off unless asked for"


async def test_why_it_stopped(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"Hello")) as api:
        reply = await api.messages.create(model=MODEL, max_tokens=2, messages=USER)
        assert (reply.stop_reason, reply.content[0].text) == ("max_tokens", "He")
        reply = await api.messages.create(
            model=MODEL, max_tokens=9, messages=USER, stop_sequences=["lo"]
        )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "lo")


async def test_events_come_in_the_official_order(serve: Serve) -> None:
    script = [THINK, *b"hm", END_THINK, *b"A", *CALL.encode(), IM_END]
    url = await serve(FakeEngine(script))
    body = {"model": MODEL, "max_tokens": 99, "messages": USER, "tools": TOOLS, "stream": True}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        raw = await reply.text()
        assert "x-jaxserve-ignored-params" not in reply.headers
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event")]
    shown = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shown == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    assert "[DONE]" not in raw


@pytest.mark.parametrize("thinking", [True, False])
async def test_thoughts_text_and_calls_are_streamed_as_blocks(serve: Serve, thinking: bool) -> None:
    thought = [THINK, *b"hm", END_THINK] if thinking else []
    engine = FakeEngine([*thought, *f"Well{CALL}\n{CALL}".encode(), IM_END])
    options: Any = {"model": MODEL, "max_tokens": 999, "messages": USER, "tools": TOOLS}
    if thinking:
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    async with client(serve, engine) as api:
        whole = await api.messages.create(**options)
        async with api.messages.stream(**options) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert "".join(texts) == "Well"
    for reply in (whole, streamed):
        kinds = [block.type for block in reply.content]
        assert kinds == ["thinking"] * thinking + ["text", "tool_use", "tool_use"]
        assert reply.content[-1].name == "add"
        assert reply.content[-1].input == {"a": 1}
        assert reply.stop_reason == "tool_use"
        if thinking:
            assert reply.content[0].thinking == "hm"
    assert whole.usage.output_tokens == streamed.usage.output_tokens


async def test_a_conversation_with_tools_goes_through_the_template(serve: Serve) -> None:
    engine = FakeEngine(b"x")
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "2"}],
    }
    messages: Any = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Well", "cache_control": {"type": "ephemeral"}},
            ],
        },
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    chatml = """{%- for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}|
        {{- (m.tool_calls or []) | tojson }}]{% endfor %}{{ tools | tojson }}"""
    url = await serve(engine, tokenizer=tiny_tokenizer(chatml))
    body = {"model": MODEL, "max_tokens": 1, "messages": messages, "tools": TOOLS}
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        assert reply.status == 200, await reply.text()
    prompt = prompt_of(engine)
    assert "[assistant|hm|Well|[]]" in prompt
    assert '"function": {"name": "add", "arguments": {"a": 1}}}]]' in prompt
    assert "[tool||2|[]][user||And?|[]]" in prompt
    assert '"parameters": {"type": "object"}' in prompt


async def test_a_last_message_of_the_assistant_is_continued(serve: Serve) -> None:
    engine = FakeEngine([*b" blue", IM_END])
    async with client(serve, engine) as api:
        reply = await api.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[*USER, {"role": "assistant", "content": "The sky is"}],
        )
    assert reply.content[0].text == " blue"
    assert prompt_of(engine).endswith("<|im_start|>assistant\nThe sky is")


async def test_tokens_are_counted_as_they_would_be_used(serve: Serve) -> None:
    engine = FakeEngine(b"x")
    async with client(serve, engine) as api:
        options: Any = {"model": MODEL, "messages": USER, "tools": TOOLS, "system": "Be brief"}
        counted = await api.messages.count_tokens(**options)
        reply = await api.messages.create(max_tokens=1, **options)
    assert counted.input_tokens == reply.usage.input_tokens


async def test_errors_are_those_of_the_official_client(serve: Serve) -> None:
    async with client(serve, FakeEngine()) as api:
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.create(model="other", max_tokens=1, messages=USER)
        for wrong in (
            {"max_tokens": 0},
            {"extra_body": {"temperature": 1.5}},
            {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {"stop_sequences": ["a"] * 65},
            {"tools": [{"name": "add"}]},
            {"tool_choice": {"type": "tool"}, "tools": TOOLS},
            {"extra_body": {"output_format": {"type": "json_schema"}}},
        ):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await api.messages.create(
                    **{"model": MODEL, "max_tokens": 1, "messages": USER, **wrong}
                )
            assert caught.value.body["type"] == "error", wrong
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        schema = {"format": {"type": "json_schema", "schema": {"not": {}}}}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.messages.create(
                model=MODEL, max_tokens=1, messages=USER, extra_body={"output_config": schema}
            )
        assert "'output_config.format.schema: " in caught.value.message
        assert "response_format" not in caught.value.message
    refusing = FakeEngine(refuse=Overloaded("the queue is full", retry_after=2))
    async with client(serve, refusing) as api:
        with pytest.raises(anthropic.RateLimitError):
            await api.messages.create(model=MODEL, max_tokens=1, messages=USER)


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "tool_use", "id": "a", "name": "add", "input": {}}),
        ("user", {"type": "thinking", "thinking": "hm", "signature": ""}),
        ("assistant", {"type": "tool_result", "tool_use_id": "a", "content": "5"}),
        ("system", {"type": "tool_result", "tool_use_id": "a", "content": "5"}),
    ],
)
async def test_blocks_that_a_role_does_not_have_are_refused(
    serve: Serve, role: str, block: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "a"}, block]
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [*USER, {"role": role, "content": content}],
    }
    url = await serve(engine := FakeEngine())
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        said = (await reply.json())["error"]["message"]
    assert reply.status == 400
    expected = f"messages[1].content[1]: a message of role {role} has no {block['type']} blocks"
    assert said == expected
    assert not engine.requests


async def test_whether_a_result_is_an_error_is_told_to_have_no_effect(serve: Serve) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "5", "is_error": True}
    messages = [*USER, {"role": "user", "content": [result]}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages}
    url = f"{await serve(FakeEngine())}/v1/messages"
    async with aiohttp.request("POST", url, json=body) as reply:
        assert reply.headers["x-jaxserve-ignored-params"] == "messages.content.is_error"


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_read(
    serve: Serve,
) -> None:
    """Claude Code takes the numbers out of the message, and leaves out as much of its history."""
    engine = FakeEngine(max_model_len=64)
    async with client(serve, engine) as api:
        long: Any = [{"role": "user", "content": "x" * 99}]
        counted = await api.messages.count_tokens(model=MODEL, messages=long)
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.messages.create(model=MODEL, max_tokens=9, messages=long)
    expected = f"prompt is too long: {counted.input_tokens} tokens > 63 maximum"
    assert caught.value.body["error"] == {"type": "invalid_request_error", "message": expected}


async def test_an_answer_has_its_id_where_the_official_client_looks_for_it(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"Hi")) as api:
        raw = await api.messages.with_raw_response.create(
            model=MODEL, max_tokens=1, messages=USER, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.request_id == "mine"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await api.messages.create(model="other", max_tokens=1, messages=USER)
        assert caught.value.request_id


async def test_many_stop_sequences_are_taken(serve: Serve) -> None:
    stops = [f"stop {i}" for i in range(63)] + ["lo"]
    async with client(serve, FakeEngine(b"Hello")) as api:
        reply = await api.messages.create(
            model=MODEL, max_tokens=9, messages=USER, stop_sequences=stops
        )
    assert (reply.content[0].text, reply.stop_sequence) == ("Hel", "lo")


async def test_what_a_tool_shows_and_the_model_cannot_read_is_a_placeholder(serve: Serve) -> None:
    parts = [
        {"type": "text", "text": "See:"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "tool_reference", "tool_name": "grep"},
    ]
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": parts}
    history = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    url = await serve(engine := FakeEngine(b"x"))
    for route in ("messages", "messages/count_tokens"):
        body = {"model": MODEL, "max_tokens": 1, "messages": history, "tools": TOOLS}
        async with aiohttp.request("POST", f"{url}/v1/{route}", json=body) as reply:
            assert reply.status == 200, await reply.text()
            named = reply.headers["x-jaxserve-ignored-params"]
        assert "messages.content.image,messages.content.tool_reference" in named
    assert "See:[image: left out, this model reads text][tool_reference:" in prompt_of(engine)


async def test_tools_of_anthropics_own_types_are_left_out_and_named(serve: Serve) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, *TOOLS]
    body = {"model": MODEL, "max_tokens": 1, "messages": USER, "tools": tools}
    url = await serve(engine := FakeEngine(b"x"))
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert "tools.web_search_20250305" in reply.headers["x-jaxserve-ignored-params"]
    assert '"name": "add"' in prompt_of(engine) and "web_search" not in prompt_of(engine)


@pytest.mark.parametrize("turn", ["first", "after a call"])
async def test_every_request_of_claude_code_is_answered(serve: Serve, turn: str) -> None:
    recorded = json.loads((Path(__file__).parent / "recordings/claude_code.json").read_text())
    url = await serve(FakeEngine([*b"Done.", IM_END]))
    body = {**recorded[turn], "model": MODEL}
    async with aiohttp.request(
        "POST", f"{url}/v1/messages?beta=true", json=body, headers=recorded["headers"]
    ) as reply:
        assert reply.status == 200, await reply.text()
        assert "event: message_stop" in await reply.text()


async def test_a_failure_in_mid_stream_is_an_error_event(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"Hello", fail_after=2)) as api:
        with pytest.raises(anthropic.APIStatusError, match="could not finish"):
            async with api.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
                async for _ in stream:
                    pass


async def test_arguments_cut_short_are_kept_under_the_documented_key(serve: Serve) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": '
    async with client(serve, FakeEngine(text.encode())) as api:
        reply = await api.messages.create(
            model=MODEL, max_tokens=len(text), messages=USER, tools=TOOLS
        )
    assert reply.stop_reason == "max_tokens"
    assert reply.content[0].input == {"INVALID_JSON": '{"a": '}


async def test_a_billing_header_is_no_part_of_the_prompt(serve: Serve) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"
    engine = FakeEngine([*b"Hello", IM_END])
    async with client(serve, engine) as api:
        for number in range(2):
            own = header.format(number)
            systems: list[Any] = [
                [{"type": "text", "text": own}, {"type": "text", "text": "Be brief"}],
                [{"type": "text", "text": f"{own}\nBe brief"}],
                f"{own}\nBe brief",
                "Be brief",
                [{"type": "text", "text": own}],
            ]
            for system in systems:
                await api.messages.create(model=MODEL, max_tokens=9, messages=USER, system=system)
    prompts = [request.prompt for request in engine.requests]
    assert len(set(prompts[:4] + prompts[5:9])) == 1
    assert prompts[4] == prompts[9]
    assert "system" not in prompt_of(engine), "nothing is left of it"
    async with client(serve, engine) as api:
        later = [{"type": "text", "text": "Be brief. "}, {"type": "text", "text": header}]
        await api.messages.create(model=MODEL, max_tokens=9, messages=USER, system=later)
    assert "x-anthropic-billing-header" in prompt_of(engine), "only at the beginning"
