"""What coding agents send, as recorded from Codex 0.169 and Claude Code 2.1, texts shortened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

RECORDINGS = Path(__file__).parent / "recordings"
CODEX: dict[str, Any] = json.loads((RECORDINGS / "codex.json").read_text())
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+hi\n*** End Patch\n"


def call_of(name: str, arguments: str, end: str = "}\n") -> list[int]:
    text = f'\n{{"name": "{name}", "arguments": {arguments}{end}'
    return [CALL, *text.encode(), END_CALL]


def prompt_of(engine: FakeEngine) -> str:
    return decode(tiny_tokenizer(), engine.requests[-1].prompt, skip_special=False)


async def codex(serve: Serve, engine: FakeEngine, name: str) -> tuple[Any, list[Any]]:
    """The headers of the answer, and its events."""
    url = await serve(engine)
    body = {**CODEX[name], "model": MODEL}
    async with aiohttp.request("POST", f"{url}/v1/responses", json=body) as reply:
        assert reply.status == 200, await reply.text()
        lines = (await reply.text()).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return reply.headers, list(map(json.loads, data))


@pytest.mark.parametrize("name", CODEX)
async def test_every_request_of_codex_is_answered(serve: Serve, name: str) -> None:
    _, events = await codex(serve, FakeEngine([*b"Done.", IM_END], max_model_len=32768), name)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Done."


async def test_codex_is_told_what_its_tools_have_come_to(serve: Serve) -> None:
    engine = FakeEngine([*b"Done.", IM_END], max_model_len=32768)
    headers, events = await codex(serve, engine, "default")
    assert "tools.web_search" in headers["x-jaxserve-ignored-params"].split(",")
    assert '"name": "multi_agent_v1.close_agent"' in prompt_of(engine)
    kinds = [tool["type"] for tool in events[-1]["response"]["tools"]]
    assert "namespace" in kinds and "web_search" not in kinds


@pytest.mark.parametrize("spelled", ["multi_agent_v1.close_agent", "close_agent"])
async def test_a_call_of_a_namespace_comes_back_as_codex_expects_it(
    serve: Serve, spelled: str
) -> None:
    script = [*call_of(spelled, '{"target": "x"}'), IM_END]
    _, events = await codex(serve, FakeEngine(script, max_model_len=32768), "default")
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        *("function_call", "multi_agent_v1", "close_agent"),
    )
    assert item["arguments"] == '{"target": "x"}'
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["namespace"] == "multi_agent_v1"


async def test_a_patch_of_codex_follows_its_grammar_and_streams(serve: Serve) -> None:
    script = [THINK, *b"hm", END_THINK, *call_of("apply_patch", PATCH, ""), IM_END]
    engine = FakeEngine(script, max_model_len=32768)
    _, events = await codex(serve, engine, "freeform tools")
    item = events[-1]["response"]["output"][1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH and len(deltas) > 9
    done = [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert done == [PATCH]
    assert follows(engine, script)
    assert not follows(engine, call_of("apply_patch", "*** Begin Patch\n*** Rename", ""))
    assert not follows(engine, call_of("apply_patch", '{"input": "*** Begin'))


def follows(engine: FakeEngine, tokens: list[int]) -> bool:
    guide = engine.requests[-1].params.guide
    assert guide is not None
    state = guide.start()
    for token in tokens:
        assert state.wait(10)
        if not state.mask[token // 8] >> token % 8 & 1:
            return False
        state.advance(token)
    return True


async def test_calls_of_all_kinds_are_read_again_as_history(serve: Serve) -> None:
    engine = FakeEngine([*b"Done.", IM_END], max_model_len=32768)
    await codex(serve, engine, "after a call of a namespace")
    prompt = prompt_of(engine)
    assert f"<tool_call>\n{PATCH}" in prompt
    assert prompt.count("<|im_start|>tool\nSome output.") == 2


TOOLS: Any = [
    {"type": "custom", "name": "sql", "format": {"type": "text"}},
    {"type": "function", "name": "add", "parameters": {"type": "object"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
]


async def test_the_official_client_has_custom_tools_whole_and_streamed(serve: Serve) -> None:
    engine = FakeEngine([*call_of("sql", "SELECT 1}"), IM_END])
    async with client(serve, engine) as api:
        whole = await api.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        async with api.responses.stream(model=MODEL, input="Hi", tools=TOOLS) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        for reply in (whole, streamed):
            (call,) = reply.output
            assert (call.type, call.name, call.input) == ("custom_tool_call", "sql", "SELECT 1}")
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1"}
        history = [{"role": "user", "content": "Hi"}, call.to_dict(), result]
        await api.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert "<tool_call>\nSELECT 1}\n</tool_call>" in prompt_of(engine)
    assert "<|im_start|>tool\n1<|im_end|>" in prompt_of(engine)


SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


async def test_tools_can_be_called_beside_a_format_in_the_other_apis(serve: Serve) -> None:
    """The Agents SDK's `output_type` and Anthropic's `output_config.format` come with tools."""
    called, answered = call_of("add", '{"b": 1}'), [*b'{"a": 1}', IM_END]
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    engine = FakeEngine([*called, IM_END])
    async with client(serve, engine) as api:
        reply = await api.responses.create(
            model=MODEL, input="Hi", tools=[TOOLS[1]], text={"format": form}
        )
        assert reply.output[0].type == "function_call"
        assert follows(engine, called) and follows(engine, answered)
        assert not follows(engine, list(b"Well"))
    url = await serve(engine)
    body = {"model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    body |= {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as answer:
        message = await answer.json()
    assert (message["stop_reason"], message["content"][0]["name"]) == ("tool_use", "add")
    assert follows(engine, called) and follows(engine, answered)
    assert not follows(engine, list(b"Well"))


async def test_a_choice_may_name_a_custom_tool_or_allow_some(serve: Serve) -> None:
    namespace = {"type": "namespace", "name": "n", "description": "N", "tools": [TOOLS[1]]}
    tools = [*TOOLS, namespace]
    engine = FakeEngine([*call_of("sql", "x"), IM_END])
    sql, add, inner = call_of("sql", "x"), call_of("add", "{}"), call_of("n.add", "{}")
    text = list(b"Hi")

    async def choose(api: Any, choice: Any) -> list[bool]:
        await api.responses.create(model=MODEL, input="Hi", tools=tools, tool_choice=choice)
        return [follows(engine, tokens) for tokens in (sql, add, inner, text)]

    async with client(serve, engine) as api:
        assert await choose(api, {"type": "custom", "name": "sql"}) == [True, False, False, False]
        allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [TOOLS[1], TOOLS[2]]}
        assert await choose(api, allowed) == [False, True, False, True]
        allowed = {**allowed, "mode": "required", "tools": [{"type": "namespace", "name": "n"}]}
        assert await choose(api, allowed) == [False, False, True, False]
        with pytest.raises(openai.BadRequestError) as caught:
            await choose(api, {"type": "web_search"})
        assert caught.value.param == "tool_choice.type"


async def test_what_a_tool_shows_and_the_model_cannot_read_is_a_placeholder(serve: Serve) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    history: Any = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    ]
    engine = FakeEngine(b"Hi")
    url = await serve(engine)
    async with aiohttp.request("POST", f"{url}/v1/responses", json={"input": history}) as reply:
        assert reply.status == 200, await reply.text()
        named = reply.headers["x-jaxserve-ignored-params"].split(",")
    assert {"input.web_search_call", "input.output.input_image"} <= set(named)
    assert "[input_image: left out, this model reads text]" in prompt_of(engine)
    history[0]["content"] = [image]
    async with aiohttp.request("POST", f"{url}/v1/responses", json={"input": history}) as reply:
        assert reply.status == 400, "a user's own image is not left out"
        assert (await reply.json())["error"]["param"] == "input[0].content[0].type"
