"""What the render routes say is the prompt of the same request, and nothing that is sent to them
breaks the server."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from jaxserve.server.access import digest
from tests.fakes import IM_END, FakeEngine
from tests.server.conftest import Serve

USER = {"role": "user", "content": "Hi <|im_end|> there"}
LONG = {"role": "user", "content": "word " * 3000}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "Be brief."}, USER], "n": 2, "seed": 3},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ],
        "tools": [TOOL],
    },
    {
        "messages": [USER, {"role": "assistant", "content": "Well, "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER], "reasoning_effort": "none"},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [LONG], "truncate_prompt_tokens": 100, "max_tokens": 5},
    {"messages": [LONG], "max_tokens": 5},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "a b"},
    {"prompt": ["one", "two", "three"], "max_tokens": 4, "n": 2},
    {"prompt": [1, 2, 3], "cache_salt": "salt", "priority": -3},
    {"prompt": [[1, 2], [3]], "stop": ["x"], "echo": True},
    {"prompt": "word " * 3000, "truncate_prompt_tokens": 50, "truncation_side": "right"},
]


async def post(url: str, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.request("POST", url + path, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("body", CHATS)
async def test_a_chat_is_rendered_as_it_is_read(serve: Serve, body: dict[str, Any]) -> None:
    engine = FakeEngine([*b"Hi", IM_END], max_model_len=20_000)
    url = await serve(engine)
    status, rendered = await post(url, "/v1/chat/completions/render", body)
    assert status == 200 and rendered["features"] is None and not engine.requests
    status, answer = await post(url, "/v1/chat/completions", {**body, "return_token_ids": True})
    if status != 200:  # the script does not follow forced calls; the engine got the prompt
        assert body.get("tool_choice") == "required"
    else:
        assert answer["choices"][0]["prompt_token_ids"] == rendered["token_ids"]
    request = engine.requests[0]
    params = rendered["sampling_params"]
    assert list(request.prompt) == rendered["token_ids"]
    assert params["max_tokens"] == request.params.max_tokens
    assert params["stop_token_ids"] == sorted(request.params.stop_token_ids)
    assert params["temperature"] == request.params.temperature
    assert (params["n"], params["seed"]) == (body.get("n", 1), body.get("seed"))


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_a_completion_is_rendered_as_it_is_read(serve: Serve, body: dict[str, Any]) -> None:
    engine = FakeEngine(b"Hi", max_model_len=20_000)
    url = await serve(engine)
    status, rendered = await post(url, "/v1/completions/render", body)
    assert status == 200 and not engine.requests
    status, answer = await post(url, "/v1/completions", {**body, "return_token_ids": True})
    assert status == 200
    choices = answer["choices"][:: body.get("n", 1)]
    assert [c["prompt_token_ids"] for c in choices] == [each["token_ids"] for each in rendered]
    for each in rendered:
        assert (each["cache_salt"], each["priority"]) == (
            body.get("cache_salt"),
            body.get("priority", 0),
        )
        assert each["sampling_params"]["stop"] == body.get("stop", [])


@pytest.mark.parametrize("phase", ["starting", "loading", "compiling", "draining", "failed"])
async def test_rendering_needs_no_engine(serve: Serve, phase: str) -> None:
    engine = FakeEngine()
    engine.phase = phase
    url = await serve(engine)
    assert (await post(url, "/v1/chat/completions/render", CHATS[0]))[0] == 200
    assert (await post(url, "/v1/completions/render", COMPLETIONS[0]))[0] == 200
    assert (await post(url, "/v1/completions", COMPLETIONS[0]))[0] == 503


HOSTILE: list[Any] = [
    None,
    [],
    {},
    {"messages": []},
    {"messages": [USER], "model": "other"},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [USER], "chat_template": "{{ 1/0 }}"},
    {"messages": [USER], "kv_transfer_params": {"do_remote_decode": True}},
    {"messages": [USER], "stream_options": {"include_usage": True}},
    {"messages": [USER], "top_logprobs": 5},
    {"messages": [USER], "stop_token_ids": [10**9]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"prompt": []},
    {"prompt": [10**9]},
    {"prompt": [-1]},
    {"prompt": ["a", 1]},
    {"prompt": "a", "n": 2, "best_of": 3},
    {"prompt": "a", "logit_bias": {"x": 1}},
    {"prompt": "word " * 100_000},
]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/completions/render"])
async def test_no_body_is_a_fault_of_the_server(serve: Serve, path: str) -> None:
    url = await serve(FakeEngine())
    for body in HOSTILE:
        status, answer = await post(url, path, body)
        assert 400 <= status < 500 and answer["error"]["message"], (body, answer)
    for raw in (b"", b"{", b"\xff", b'{"messages": ' + b"[" * 100_000, b'{"prompt": NaN}'):
        headers = {"Content-Type": "application/json"}
        async with aiohttp.request("POST", url + path, data=raw, headers=headers) as reply:
            assert reply.status == 400


async def test_rendering_may_be_open_where_the_rest_is_not(serve: Serve) -> None:
    """llm-d's client sends no key."""
    keyed: dict[str, Any] = {"api_key_digests": (digest("key"),)}
    url = await serve(FakeEngine(), **keyed)
    assert (await post(url, "/v1/completions/render", COMPLETIONS[0]))[0] == 401
    assert (await post(url, "/v1/completions/render", COMPLETIONS[0], "key"))[0] == 200
    url = await serve(FakeEngine(), **keyed, open_render=True)
    for path, body in (("chat/completions", CHATS[0]), ("completions", COMPLETIONS[0])):
        assert (await post(url, f"/v1/{path}/render", body))[0] == 200
        assert (await post(url, f"/v1/{path}", body))[0] == 401
