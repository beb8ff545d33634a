"""The official client of the Responses API, whole and streamed."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.api import FinishReason
from jaxserve.tokenizer import decode
from tests.fakes import CALL as CALL_TOKEN
from tests.fakes import END_CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def prompt_of(engine: FakeEngine) -> str:
    return decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)


async def test_an_input_is_answered(serve: Serve) -> None:
    engine = FakeEngine([*b"Hello", IM_END], cached_tokens=3)
    async with client(serve, engine) as api:
        reply = await api.responses.create(
            model=MODEL, input="Hi", instructions="Be brief", temperature=0.5, store=False
        )
    assert (reply.object, reply.status, reply.model) == ("response", "completed", MODEL)
    assert reply.output_text == "Hello"
    assert (reply.store, reply.temperature, reply.incomplete_details) == (False, 0.5, None)
    assert reply.usage.input_tokens == len(engine.requests[0].prompt)
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6
    assert "system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in prompt_of(engine)


async def test_an_output_cut_short_is_incomplete(serve: Serve) -> None:
    async with client(serve, FakeEngine(b"Hello")) as api:
        reply = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
        assert reply.status == "incomplete"
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in reply.output] == ["incomplete"]
        stream = await api.responses.create(
            model=MODEL, input="Hi", max_output_tokens=2, stream=True
        )
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "He"


async def test_events_come_in_the_official_order(serve: Serve) -> None:
    script = [THINK, *b"hm", END_THINK, *f"Well{CALL}".encode(), IM_END]
    async with client(serve, FakeEngine(script)) as api:
        stream = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS, stream=True)
        events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    shown = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    item, part = "output_item", "content_part"
    assert shown == [
        *("created", "in_progress"),
        *(f"{item}.added", f"{part}.added", "reasoning_text.delta", "reasoning_text.done"),
        *(f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{part}.added", "output_text.delta", "output_text.done"),
        *(f"{part}.done", f"{item}.done"),
        *(f"{item}.added", "function_call_arguments.delta", "function_call_arguments.done"),
        f"{item}.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Well"
    assert final.output[0].content[0].text == "hm"
    assert (final.output[2].name, final.output[2].arguments) == ("add", '{"a": 1}')
    done = [event.item.to_dict() for event in events if event.type.endswith("item.done")]
    assert done == [item.to_dict() for item in final.output]
    ids = {e.item_id for e in events if hasattr(e, "item_id")}
    assert ids == {item.id for item in final.output}


async def test_streamed_and_whole_outputs_are_equal(serve: Serve) -> None:
    script = [THINK, *b"hm", END_THINK, *f"Well{CALL}\n{CALL}".encode(), IM_END]
    async with client(serve, FakeEngine(script)) as api:
        whole = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        async with api.responses.stream(model=MODEL, input="Hi", tools=TOOLS) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
    for reply in (whole, streamed):
        assert [item.type for item in reply.output] == [
            *("reasoning", "message", "function_call", "function_call")
        ]
    assert whole.output_text == streamed.output_text
    assert whole.usage.output_tokens == streamed.usage.output_tokens


async def test_the_output_goes_back_in_as_input(serve: Serve) -> None:
    engine = FakeEngine([THINK, *b"hm", END_THINK, *f"Well{CALL}".encode(), IM_END])
    async with client(serve, engine) as api:
        first = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        history = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
        history += [item.to_dict() for item in first.output]
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        await api.responses.create(model=MODEL, input=[*history, result], tools=TOOLS)
    prompt = prompt_of(engine)
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nWell<tool_call>" in prompt
    assert "<|im_start|>tool\n2<|im_end|>" in prompt
    assert prompt.count("<|im_start|>assistant") == 2


async def test_logprobs_come_on_request(serve: Serve) -> None:
    async with client(serve, FakeEngine([*b"ab", IM_END])) as api:
        options: Any = {
            "model": MODEL,
            "input": "Hi",
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        }
        reply = await api.responses.create(**options)
        stream = await api.responses.create(**options, stream=True)
        events = [event async for event in stream if event.type == "response.output_text.delta"]
    entries = reply.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == ["a", "b"]
    assert len(entries[0].top_logprobs) == 2
    assert [event.logprobs[0].token for event in events] == ["a", "b"]


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        ("aé€b".encode(), ["a", "é", "€", "b"]),
        (b"a\n\nb\n", ["a", "\n\nb", "\n"]),
        ([*b"a", CALL_TOKEN, *b"no", END_CALL, *b"b"], ["a", "<tool_call>no</tool_call>", "b"]),
        ([THINK, *b"hm\n", END_THINK, *b"\n\nab"], ["a", "b"]),
        ([*b"a\n", CALL_TOKEN, *b'{"name": "add", "arguments": {}}', END_CALL], ["a"]),
    ],
    ids=["characters", "line_breaks", "no_call", "thought", "call"],
)
async def test_all_tokens_of_a_text_have_logprobs_when_it_is_shown(
    serve: Serve, script: Any, texts: list[str]
) -> None:
    options: Any = {"model": MODEL, "input": "Hi", "tools": TOOLS, "top_logprobs": 1}
    async with client(serve, FakeEngine(script)) as api:
        reply = await api.responses.create(**options)
        stream = await api.responses.create(**options, stream=True)
        events = [event async for event in stream if event.type == "response.output_text.delta"]
    assert [event.delta for event in events] == texts
    assert [spelled(event.logprobs) for event in events] == texts
    (message,) = [item for item in reply.output if item.type == "message"]
    assert spelled(message.content[0].logprobs) == "".join(texts)


def spelled(logprobs: Any) -> str:
    return b"".join(bytes(entry.bytes) for entry in logprobs).decode()


async def test_thinking_is_switched_off_by_the_effort(serve: Serve) -> None:
    engine = FakeEngine(b"x")
    async with client(serve, engine) as api:
        await api.responses.create(model=MODEL, input="Hi", reasoning={"effort": "none"})
    assert prompt_of(engine).endswith("</think>\n\n")


async def test_what_needs_a_store_or_is_not_text_is_refused_by_name(serve: Serve) -> None:
    async with client(serve, FakeEngine()) as api:
        for wrong, param in (
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"background": True}, "background"),
            ({"input": []}, "input"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
            ({"input": [{"type": "haiku", "id": "x"}]}, "input[0].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            (
                {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
                "tools[0].format.syntax",
            ),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
            ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}},
                "tool_choice",
            ),
            ({"include": ["everything"]}, "include[0]"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.responses.create(**{"model": MODEL, "input": "Hi", **wrong})
            assert caught.value.param == param, caught.value


async def test_a_bad_schema_is_refused_in_the_words_of_this_api(serve: Serve) -> None:
    schema: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}
    async with client(serve, FakeEngine()) as api:
        for more in ({}, {"tools": TOOLS}):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.responses.create(model=MODEL, input="Hi", text=schema, **more)
            assert caught.value.param == "text.format.schema"
            assert "text.format.schema" in caught.value.message
            assert "response_format" not in caught.value.message


async def test_fields_without_effect_are_named(serve: Serve) -> None:
    url = await serve(FakeEngine(b"x"), response_store_bytes=0)
    body = {"input": "Hi", "store": True, "reasoning": {"summary": "auto"}, "nonsense": 1}
    body |= {"truncation": "auto", "max_tool_calls": 3, "include": ["file_search_call.results"]}
    async with aiohttp.request("POST", f"{url}/v1/responses", json=body) as reply:
        assert reply.status == 200
        named = reply.headers["x-jaxserve-ignored-params"]
    assert named == (
        "nonsense,store,reasoning.summary,truncation,max_tool_calls,include.file_search_call.results"
    )
    body = {"input": "Hi", "store": True, "truncation": "disabled", "include": []}
    async with aiohttp.request("POST", f"{url}/v1/responses", json=body) as reply:
        assert reply.headers["x-jaxserve-ignored-params"] == "store"


@pytest.mark.parametrize(
    ("finish", "code"),
    [(FinishReason.ERROR, "server_error"), (FinishReason.GRAMMAR, "invalid_prompt")],
)
async def test_a_failure_in_mid_stream_is_a_failed_response(
    serve: Serve, finish: FinishReason, code: str
) -> None:
    async with client(serve, FakeEngine(b"Hello", finish=finish)) as api:
        stream = await api.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == code


async def test_padded_deltas_say_nothing_by_their_size(serve: Serve) -> None:
    url = await serve(FakeEngine([*"aé€x".encode(), IM_END]))
    body = {"input": "Hi", "stream": True, "stream_options": {"include_obfuscation": True}}
    async with aiohttp.request("POST", f"{url}/v1/responses", json=body) as reply:
        raw = await reply.text()
    deltas = [line for line in raw.splitlines() if '"response.output_text.delta","seq' in line]
    assert deltas
    assert len({len(line.encode()) for line in deltas}) == 1
