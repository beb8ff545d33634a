"""Structured output and forced calls over HTTP, as far as the server has a part in it."""

from __future__ import annotations

import json
import threading
from typing import Any

import aiohttp
import pytest

from jaxserve.structured import BadWords, GrammarsBusy, Guides, Thinking
from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve
from tests.server.constrained import (
    CALLED,
    FORMAT,
    SCHEMA,
    TOOLS,
    USER,
    call_of,
    chat,
    first_tokens,
    follower,
    tool_with,
)


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
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ):
        status, body = await chat(serve, FakeEngine(), **fields)
        assert status == 400 and "cannot be used together" in body["error"]["message"]
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


@pytest.mark.parametrize("form", [FORMAT, {"type": "json_object"}])
async def test_tools_may_be_called_instead_of_an_answer_in_the_format(
    serve: Serve, form: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": form}
    engine = FakeEngine([*b"\n\n", *CALLED])
    status, body = await chat(serve, engine, **fields)
    assert (status, first_tokens(engine)) == (200, {ord("{"), ord("\n"), CALL, THINK})
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    engine = FakeEngine([THINK, *b"hm", END_THINK, *b'\n\n{"a": 2}', IM_END])
    _, body = await chat(serve, engine, **fields)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", '{"a": 2}')
    assert "tool_calls" not in message


async def test_the_grammar_of_calls_or_an_answer_takes_either_to_its_end(serve: Serve) -> None:
    engine = FakeEngine(b"{}")
    await chat(serve, engine, tools=TOOLS, response_format=FORMAT)
    followed = follower(engine)
    assert followed([*b'{"a": 2}', IM_END])
    assert followed([THINK, *b"hm", END_THINK, *b'\n\n{"a": 2}', IM_END])
    assert followed([THINK, *b"hm", END_THINK, *b"\n\n", *CALLED])
    assert followed([*CALLED[:-1], *b"\n", *CALLED])
    for wrong in (b"Well", b'{"b"', [CALL, *b'\n{"name": "h'], [*CALLED[:-1], *b'\n{"a"']):
        assert not followed([*wrong])
    await chat(serve, engine, tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)
    followed = follower(engine)
    assert followed(CALLED) and not followed([*CALLED[:-1], *b"\n"])


async def test_tools_whose_schemas_cannot_be_followed_are_called_with_any_object(
    serve: Serve,
) -> None:
    fields: dict[str, Any] = {"tools": [tool_with({"not": {}})], "response_format": FORMAT}
    engine = FakeEngine(CALLED)
    status, body = await chat(serve, engine, **fields)
    assert status == 200 and CALL in first_tokens(engine)
    assert body["choices"][0]["message"]["tool_calls"]
    bad = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    status, body = await chat(serve, engine, tools=TOOLS, response_format=bad)
    assert (status, body["error"]["param"]) == (400, "response_format.json_schema.schema")


async def test_a_forced_call_goes_before_a_format(serve: Serve) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        engine = FakeEngine(CALLED)
        fields = {"tools": TOOLS, "response_format": FORMAT, "tool_choice": choice}
        status, body = await chat(serve, engine, **fields)
        assert status == 200 and first_tokens(engine) == {CALL, THINK}
        assert body["choices"][0]["message"]["tool_calls"]


async def test_only_allowed_tools_are_called_and_all_are_shown(serve: Serve) -> None:
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "f"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        engine = FakeEngine(CALLED)
        _, body = await chat(serve, engine, tools=TOOLS, tool_choice=choice)
        assert body["choices"][0]["message"]["tool_calls"]
        prompt = decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)
        assert '"name": "g"' in prompt
        followed = follower(engine)
        assert followed(CALLED) and followed(b"Well") == (mode == "auto")
        assert not followed(call_of("g", '{"a": 1}}\n'))
    status, body = await chat(
        serve,
        FakeEngine(),
        tools=TOOLS,
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "h"}}]},
        },
    )
    assert (status, body["error"]["param"]) == (400, "tool_choice")


async def test_tools_of_other_servers_are_left_out_and_named(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi"))
    for tools in ([{"type": "web_search"}, *TOOLS], [{"type": "web_search"}]):
        body = {"messages": [USER], "tools": tools, "tool_choice": "auto"}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
            assert reply.headers["x-jaxserve-ignored-params"] == "tools.web_search"


async def test_no_tools_to_choose_from_are_none(serve: Serve) -> None:
    for fields in ({"tools": [], "tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}):
        status, _ = await chat(serve, FakeEngine(b"Hi"), **fields)
        assert status == 200


async def test_no_turn_for_a_grammar_is_a_503_that_says_when_to_come_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: Any) -> Any:
        raise GrammarsBusy("7 other grammars wait", retry_after=2.5)

    monkeypatch.setattr(Guides, "compile", busy)
    url = await serve(FakeEngine())
    body = {"messages": [USER], "guided_regex": "a"}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (503, "grammars_busy")
        assert reply.headers["Retry-After"] == "3" and error["message"] == "7 other grammars wait"


async def test_a_grammar_is_compiled_for_the_key_of_its_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    compile_one = Guides.compile

    async def recorded(self: Guides, grammar: Any, thinking: Thinking, tenant: str) -> Any:
        tenants.append(tenant)
        return await compile_one(self, grammar, thinking, tenant)

    monkeypatch.setattr(Guides, "compile", recorded)
    url = await serve(engine := FakeEngine(b"a"), isolate_cache_by_key=True)
    body, guides = {"prompt": "x", "guided_regex": "a"}, list[Any]()
    async with aiohttp.ClientSession() as session:
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
            guides.append(engine.requests[-1].params.guide)
    assert tenants[0] == tenants[2] != tenants[1] and all(tenants)
    assert guides[0].compiled is guides[2].compiled is not guides[1].compiled


async def test_many_bad_words_are_tokenised_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    make = BadWords.__init__

    def recorded(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        make(*arguments)

    monkeypatch.setattr(BadWords, "__init__", recorded)
    for count in (1, 128):
        words = [f"word {number}" for number in range(count)]
        assert (await chat(serve, FakeEngine(b"Hi"), bad_words=words))[0] == 200
    assert threads[0] == "MainThread" and threads[1].startswith("large requests")
