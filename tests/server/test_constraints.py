"""Structured output and forced calls over HTTP, as far as the server has a part in it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine
from tests.server.conftest import Serve

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool_with(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool_with(SCHEMA, name) for name in ("f", "g")]
CALLED = [CALL, *b'\n{"name": "f", "arguments": {"a": 1}}\n', END_CALL, IM_END]


async def chat(serve: Serve, engine: FakeEngine, **fields: Any) -> tuple[int, Any]:
    url = await serve(engine)
    body = {"messages": [USER], **fields}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
        return reply.status, await reply.json()


def first_tokens(engine: FakeEngine) -> set[int]:
    guide = engine.requests[-1].params.guide
    assert guide is not None
    bits = np.unpackbits(np.frombuffer(guide.start().mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


async def test_a_schema_reaches_the_engine_and_ends_with_the_models_end(serve: Serve) -> None:
    engine = FakeEngine(b"{}")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    status, _ = await chat(serve, engine, response_format=form, n=2, ignore_eos=True)
    assert status == 200
    assert IM_END in engine.requests[0].params.stop_token_ids, "the grammar's end ends it"
    assert first_tokens(engine) == {ord("{"), THINK}
    await chat(serve, engine, response_format=form, reasoning_effort="none")
    assert first_tokens(engine) == {ord("{")}, "the think block is closed already"


async def test_without_a_constraint_there_is_no_guide(serve: Serve) -> None:
    engine = FakeEngine(b"Hi")
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": TOOLS}):
        await chat(serve, engine, **fields)
        assert engine.requests[-1].params.guide is None


async def test_a_forced_call_may_only_begin_as_a_call(serve: Serve) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        engine = FakeEngine([THINK, END_THINK, *CALLED])
        status, body = await chat(serve, engine, tools=TOOLS, tool_choice=choice)
        assert status == 200 and first_tokens(engine) == {CALL, THINK}
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        reason = body["choices"][0]["finish_reason"]
        assert reason == ("tool_calls" if choice == "required" else "stop")


async def test_a_budget_that_thoughts_cannot_exceed_needs_no_guide(serve: Serve) -> None:
    engine = FakeEngine(b"Hi")
    cases = {(5, None): True, (10, None): False, (11, None): False, (5, "none"): False}
    for (budget, effort), guided in cases.items():
        fields = {"thinking_token_budget": budget, "reasoning_effort": effort, "max_tokens": 10}
        assert (await chat(serve, engine, **fields))[0] == 200
        assert (engine.requests[-1].params.guide is not None) == guided


async def test_a_completion_of_a_grammar_has_no_thoughts_to_be_cut_short(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(b"a"))
    body = {"prompt": "<think>\n", "guided_regex": "a+", "thinking_token_budget": 0}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200
    assert first_tokens(engine) == {ord("a")}


async def test_a_marker_in_constrained_text_is_text(serve: Serve) -> None:
    engine = FakeEngine([*b'{"a": "', CALL, *b'"}', IM_END])
    _, body = await chat(
        serve, engine, tools=TOOLS, response_format={"type": "json_object"}, reasoning_effort="none"
    )
    assert body["choices"][0]["message"]["content"] == '{"a": "<tool_call>"}'


async def test_constraints_that_exclude_each_other_are_refused_by_name(serve: Serve) -> None:
    form = {"type": "json_object"}
    for fields, param in (
        ({"response_format": form, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": form, "allowed_token_ids": [1]}, None),
        ({"response_format": form, "bad_words": ["a"]}, None),
        ({"bad_words": ["a"], "allowed_token_ids": [1]}, "bad_words"),
        ({"thinking_token_budget": 1, "allowed_token_ids": [1]}, "thinking_token_budget"),
        ({"response_format": form, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ):
        status, body = await chat(serve, FakeEngine(), **fields)
        assert status == 400 and "exclude" in body["error"]["message"]
        if param is not None:
            assert body["error"]["param"] == param


@pytest.mark.parametrize(("digits", "status"), [(30, 200), (400, 400)])
async def test_numbers_in_a_schema_may_be_large(serve: Serve, digits: int, status: int) -> None:
    """They are more than 64 bits; the second is more than a float, too."""
    schema = {"type": "object", "properties": {"é\x7f": {"type": "integer", "maximum": 10**digits}}}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"tools": [tool_with(schema)], "tool_choice": "required"},
    ):
        got, body = await chat(serve, FakeEngine(), **fields)
        assert got == status, body
        if status == 400:
            assert body["error"]["code"] == "invalid_grammar"


async def test_the_message_of_a_bad_schema_says_what_is_wrong_with_it(serve: Serve) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}
    status, body = await chat(serve, FakeEngine(), response_format=form)
    error = body["error"]
    assert (status, error["code"]) == (400, "invalid_grammar")
    assert error["param"] == "response_format.json_schema.schema" and "not" in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "("}, 'guided_regex: invalid regex "("'),
        (
            {"tools": [tool_with({"oneOf": 7})], "tool_choice": "required"},
            "tools: failed to compile JSON schema: oneOf must be an array",
        ),
        ({"guided_grammar": "start: a"}, 'guided_grammar: at 1(8): unknown name: "a"'),
    ],
)
async def test_only_a_grammar_of_the_client_s_own_is_shown(
    serve: Serve, fields: dict[str, Any], message: str
) -> None:
    _, body = await chat(serve, FakeEngine(), **fields)
    error = body["error"]["message"]
    assert error.startswith(message)
    assert (" | start: " in error) == ("guided_grammar" in fields)


async def test_parameters_of_tools_that_cannot_be_followed_are_refused_when_forced(
    serve: Serve,
) -> None:
    tool = tool_with({"not": {}})
    status, _ = await chat(serve, FakeEngine(b"Hi"), tools=[tool])
    assert status == 200, "only a forced call needs them"
    status, body = await chat(serve, FakeEngine(), tools=[tool], tool_choice="required")
    assert (status, body["error"]["param"]) == (400, "tools")
