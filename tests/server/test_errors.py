"""Whatever is wrong with a request, the answer is OpenAI's error object and names the field."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from jaxserve.api import EngineFailed, Overloaded, Rejected
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import MODEL, Serve

PART = {"type": "input_text", "text": "a"}
MESSAGES = [{"role": "user", "content": "Hi"}]


async def post(url: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
    async with aiohttp.request("POST", f"{url}{path}", **kwargs) as reply:
        body = await reply.json()
    if reply.status >= 400:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        body = body["error"]
    return reply.status, body, reply.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": None}, "prompt"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"guided_json": {"type": 1}}, "guided_json"),
        ({"suffix": "end"}, "suffix"),
    ],
)
async def test_a_bad_completion_names_the_field(serve: Serve, fields: Any, param: str) -> None:
    url = await serve(FakeEngine())
    status, error, _ = await post(url, "/v1/completions", json={"prompt": "Hi"} | fields)
    assert (status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{**MESSAGES[0], "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "tool", "content": "5", "reasoning_content": "hm"}]},
            "messages[0].reasoning_content",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "sometimes",
            },
            "tool_choice",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
async def test_a_bad_chat_names_the_field(serve: Serve, fields: Any, param: str) -> None:
    url = await serve(FakeEngine())
    status, error, _ = await post(url, "/v1/chat/completions", json={"messages": MESSAGES} | fields)
    assert status == 400
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be at most 2, got 3"),
        ({"stop": ["a"] * 5}, "stop must have at most 4 entries, got 5"),
        ({"stop": [""]}, "stop[0] must not be empty"),
        ({"cache_salt": "/" * 99}, "cache_salt must be a string matching regex"),
        ({"bad_words": ["a" * 999]}, "bad_words[0] must have at most 256 characters, got 999"),
        (
            {"logit_bias": {"1": 1, "2": 101}},
            "logit_bias.2 must be -100 to 100, got 101",
        ),
        ({"logit_bias": {"x": 1}}, "'x' is not a token id: 0 to 299"),
        (
            {"tool_choice": "maybe"},
            "tool_choice: Invalid enum value 'maybe'; it must be one of 'a",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: Invalid enum value 'xml'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be at least 1, got -1"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is required"),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name must not be empty",
        ),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role is required"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x is not known"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: chat_template_kwargs may "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is required",
        ),
        ({"messages": 1}, "messages must be a list, got an integer"),
        ({"messages": None}, "messages must be a list, got null"),
        ({"model": "gpt"}, "the model 'gpt' is not served here; this server has 'tiny'"),
    ],
)
async def test_the_message_alone_says_which_field_is_wrong_and_what_it_may_be(
    serve: Serve, fields: Any, message: str
) -> None:
    body = {"messages": MESSAGES} | fields
    _, error, _ = await post(await serve(FakeEngine()), "/v1/chat/completions", json=body)
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"max_tokens": 0}, "1, or 0 with echo, got 0"),
        ({"max_tokens": -1}, "1, or 0 with echo, got -1"),
        ({"max_tokens": -1, "echo": True}, "0, got -1"),
    ],
)
async def test_a_completion_without_tokens_needs_echo(
    serve: Serve, fields: Any, bound: str
) -> None:
    body = {"prompt": "a"} | fields
    _, error, _ = await post(await serve(FakeEngine()), "/v1/completions", json=body)
    assert error["message"] == f"max_tokens must be at least {bound}"


async def test_kinds_of_blocks_are_listed(serve: Serve) -> None:
    content = [{"type": "image", "source": {}}]
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    async with aiohttp.request(
        "POST", await serve(FakeEngine()) + "/v1/messages", json=body
    ) as reply:
        message = (await reply.json())["error"]["message"]
    assert "'image'" in message
    assert "it must be one of " in message
    assert "'text'" in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000,
        b'{"prompt": "a", "stop": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_a_body_that_is_not_proper_json_is_a_400(serve: Serve, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    url = await serve(FakeEngine())
    status, error, _ = await post(url, "/v1/completions", data=body, headers=headers)
    assert status == 400
    assert len(error["message"]) <= 1000
    if error["code"] == "invalid_json":
        assert "JSON" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "suffix": 1e999}', "suffix"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"x": 1e999}}', "stream_options[...]"),
    ],
)
async def test_a_number_out_of_range_is_found_where_nothing_reads_it(
    serve: Serve, body: bytes, param: str
) -> None:
    headers = {"Content-Type": "application/json"}
    url = await serve(FakeEngine())
    status, error, _ = await post(url, "/v1/completions", data=body, headers=headers)
    assert (status, error["param"]) == (400, param)
    assert error["message"] == f"{param}: Number out of range"


async def test_free_form_json_may_only_be_so_deep(serve: Serve) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    output = {"format": {"type": "json_schema", "schema": deep}}
    url = await serve(FakeEngine())
    for path, body, param in (
        ("chat/completions", {"messages": MESSAGES, "tools": tools}, "tools"),
        ("responses", {"input": "a", "metadata": deep}, "metadata"),
        (
            "messages",
            {"model": MODEL, "max_tokens": 1, "messages": MESSAGES, "output_config": output},
            "output_config",
        ),
    ):
        async with aiohttp.request("POST", f"{url}/v1/{path}", json=body) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert "nested more than 64 levels deep" in error["message"]
        assert param in (error.get("param"), error["message"].partition(":")[0])


async def test_bodies_that_are_too_large_or_of_another_type_are_refused(serve: Serve) -> None:
    url = await serve(FakeEngine(), max_request_bytes=100)
    status, error, _ = await post(url, "/v1/completions", json={"prompt": "a" * 200})
    assert (status, error["code"]) == (413, "request_too_large")
    assert "100 bytes" in error["message"]
    status, error, _ = await post(url, "/v1/completions", data={"prompt": "a"})
    assert (status, error["code"]) == (415, "unsupported_media_type")


async def test_unknown_routes_methods_and_models_have_the_same_shape(serve: Serve) -> None:
    url = await serve(FakeEngine())
    status, error, _ = await post(url, "/v1/nothing", json={})
    assert status == 404
    assert error["message"].endswith("/v1/nothing; GET /openapi.json lists them")
    status, error, headers = await post(url, "/v1/models", json={})
    assert status == 405
    assert error["message"] == "/v1/models does not take POST, but GET, HEAD"
    assert "GET" in headers["Allow"]
    status, error, _ = await post(url, "/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_a_prompt_that_cannot_fit_states_the_numbers(serve: Serve) -> None:
    url = await serve(FakeEngine(max_model_len=10))
    status, error, _ = await post(url, "/v1/completions", json={"prompt": "a" * 10})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "10 tokens" in error["message"]


async def test_max_tokens_is_cut_to_the_room_that_the_prompt_leaves(serve: Serve) -> None:
    engine = FakeEngine(max_model_len=10)
    url = await serve(engine)
    await post(url, "/v1/completions", json={"prompt": "a" * 8, "max_tokens": 50})
    assert engine.requests[0].params.max_tokens == 2


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (Rejected("prompt needs 9 pages, the pool has 8", param="prompt"), 400, None),
        (Overloaded("the queue is full"), 429, "overloaded"),
        (EngineFailed("at 0x7f"), 500, "generation_failed"),
        (RuntimeError("/secret/path"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_has_a_status_even_for_a_stream(
    serve: Serve, refusal: Exception, status: int, code: str | None, stream: bool
) -> None:
    url = await serve(FakeEngine(refuse=refusal))
    body = {"prompt": "a", "stream": stream, "n": 2}
    got, error, headers = await post(url, "/v1/completions", json=body)
    assert (got, error["code"]) == (status, code)
    assert ("Retry-After" in headers) == (status == 429)
    assert "secret" not in error["message"]


async def test_a_server_that_is_not_ready_says_when_to_come_back(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine)
    for phase in ("loading", "draining"):
        engine.phase = phase
        status, error, headers = await post(url, "/v1/completions", json={"prompt": "a"})
        assert (status, error["code"]) == (503, "not_ready")
        assert headers["Retry-After"] == "5"
    assert engine.requests == []


async def test_a_model_without_a_chat_template_only_completes(serve: Serve) -> None:
    url = await serve(FakeEngine(), tokenizer=tiny_tokenizer(chat_template=None))
    status, error, _ = await post(url, "/v1/chat/completions", json={"messages": MESSAGES})
    assert status == 400
    assert "/v1/completions" in error["message"]


async def test_a_template_that_refuses_the_messages_is_a_400(serve: Serve) -> None:
    template = "{{ raise_exception('no system messages') }}"
    url = await serve(FakeEngine(), tokenizer=tiny_tokenizer(chat_template=template))
    status, error, _ = await post(url, "/v1/chat/completions", json={"messages": MESSAGES})
    assert (status, error["code"]) == (400, "chat_template_error")
    assert "no system messages" in error["message"]


async def test_request_ids_are_echoed_or_made(serve: Serve) -> None:
    url = await serve(FakeEngine())
    for path in ("/v1/completions", "/nowhere"):
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            async with aiohttp.request(
                "POST", url + path, json=body, headers={"x-request-id": "mine-1"}
            ) as reply:
                assert reply.headers["x-request-id"] == "mine-1"
            async with aiohttp.request("POST", url + path, json=body) as reply:
                assert len(reply.headers["x-request-id"]) == 32
                assert reply.headers["Server"] == "jaxserve"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "model": "no-such"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_request_id_in_the_body_is_echoed_unless_a_header_has_one(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    url = await serve(FakeEngine())
    body = body | {"request_id": "mine-2"}
    for header, expected in (({}, "mine-2"), ({"x-request-id": "proxy"}, "proxy")):
        async with aiohttp.request("POST", url + path, json=body, headers=header) as reply:
            assert reply.headers["x-request-id"] == expected


async def test_one_request_holds_a_limited_number_of_sequences(serve: Serve) -> None:
    url = await serve(FakeEngine(["a"]))
    body = {"prompt": ["x"] * 100, "n": 11, "max_tokens": 1}
    status, error, _ = await post(url, "/v1/completions", json=body)
    assert status == 400
    assert error["param"] == "n"
    assert "1024" in error["message"] and "1100" in error["message"]
