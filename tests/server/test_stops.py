"""Stop strings end the answer that a client sees: no thoughts, calls or spaces of the template."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

USER: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THOUGHT = [THINK, *b"\nfirst\n\nQuestion: second\n", END_THINK, *b"\n\n"]
CALLED = [CALL, *b'\n{"name": "f", "arguments": {"a": "x\\n\\ny Question:"}}\n', END_CALL]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_not_ended_by_what_it_thinks(serve: Serve, stream: bool) -> None:
    """As lm-eval asks: its tasks stop at an empty line or at the next question."""
    engine = FakeEngine([*THOUGHT, *b"Four.\n\nQuestion: next"], hang=True)
    fields: Any = {"model": MODEL, "messages": USER, "stop": ["\n\n", "Question:"]}
    async with client(serve, engine) as api:
        if stream:
            chunks = [c async for c in await api.chat.completions.create(stream=True, **fields)]
            content = "".join(c.choices[0].delta.content or "" for c in chunks)
            thought = "".join(getattr(c.choices[0].delta, "reasoning", "") or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            (choice,) = (await api.chat.completions.create(**fields)).choices
            content, thought, reason = (
                choice.message.content,
                choice.message.reasoning,
                choice.finish_reason,
            )
    assert (content, reason) == ("Four.", "stop")
    assert thought == "first\n\nQuestion: second"
    assert engine.aborted.is_set(), "nothing is generated behind it"


async def test_a_call_is_not_cut_by_a_stop_string(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "tools": TOOLS, "stop": ["Question:", "y"]}
    async with client(serve, FakeEngine([*THOUGHT, *b"Well\n", *CALLED, IM_END])) as api:
        (choice,) = (await api.chat.completions.create(**fields)).choices
    assert choice.message.tool_calls[0].function.arguments == '{"a": "x\\n\\ny Question:"}'
    assert (choice.message.content, choice.finish_reason) == ("Well", "tool_calls")


async def test_a_stop_string_does_not_reach_over_a_call(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "tools": TOOLS, "stop": "ab"}
    async with client(serve, FakeEngine([*b"a", *CALLED, *b"b", IM_END])) as api:
        (choice,) = (await api.chat.completions.create(**fields)).choices
    assert choice.message.content == "ab"
    assert len(choice.message.tool_calls) == 1


async def test_text_held_for_a_stop_string_appears_at_the_end(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "stop": "END"}
    async with client(serve, FakeEngine([*b"aENxEN", IM_END])) as api:
        (choice,) = (await api.chat.completions.create(**fields)).choices
        assert choice.message.content == "aENxEN"
        stream = await api.chat.completions.create(stream=True, **fields)
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert texts == ["", "a", "", "", "ENx", "", "", "EN"], "an event per token"


async def test_the_logprobs_of_held_text_are_not_lost(serve: Serve) -> None:
    fields: Any = {"model": MODEL, "input": "Hi", "top_logprobs": 1}
    fields["include"] = ["message.output_text.logprobs"]
    async with client(serve, FakeEngine([*THOUGHT, *b"ab", IM_END])) as api:
        reply = await api.responses.create(**fields)
    entries = reply.output[-1].content[0].logprobs
    assert [entry.token for entry in entries] == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_not_ended_by_what_it_thinks(serve: Serve, stream: bool) -> None:
    engine = FakeEngine([*THOUGHT, *b"Four.\n\nmore"], hang=True)
    url = await serve(engine)
    body = {"model": MODEL, "messages": USER, "max_tokens": 999, "stop_sequences": ["\n\n"]}
    body |= {"thinking": {"type": "adaptive"}, "stream": stream}
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        text = await reply.text()
    if stream:
        deltas = [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if "_delta" in line and line[0] == "d"
        ]
        shown = "".join(d["delta"].get("text", d["delta"].get("thinking", "")) for d in deltas)
    else:
        shown = "".join(
            block.get("thinking", block.get("text")) for block in json.loads(text)["content"]
        )
    assert shown == "first\n\nQuestion: secondFour."
    assert '"stop_sequence":"\\n\\n"' in text
