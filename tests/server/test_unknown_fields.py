"""Fields that nothing here knows, or that ask for nothing: accepted, and named in a header."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.fakes import FakeEngine
from tests.server.conftest import Serve
from tests.server.test_errors import MESSAGES, post

FORM = {"type": "json_object", "x": {}}


async def test_values_that_ask_for_nothing_are_accepted(serve: Serve) -> None:
    engine = FakeEngine()
    harmless = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "logprobs": None,
        "best_of": 1,
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    status, _, headers = await post(
        await serve(engine), "/v1/chat/completions", json={"messages": MESSAGES} | harmless
    )
    assert status == 200
    assert "x-jaxserve-ignored-params" not in headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [
                {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}"}}
            ]}]},
        ),
        ("/v1/responses", {"input": [{"type": None, "role": "user", "content": "a"}]}),
    ],
)  # fmt: skip
async def test_null_is_the_same_as_leaving_a_field_out(serve: Serve, path: str, body: Any) -> None:
    status, reply, _ = await post(await serve(FakeEngine()), path, json=body)
    assert status == 200, reply


async def test_unknown_fields_are_listed_in_a_header_and_counted(serve: Serve) -> None:
    url = await serve(FakeEngine())
    body = {"prompt": "a", "top_q": 1, "wibble": {"x": [1]}, "\n": 1}
    status, _, headers = await post(url, "/v1/completions", json=body)
    assert status == 200
    assert headers["x-jaxserve-ignored-params"] == "top_q,wibble"
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        assert 'jaxserve_ignored_params_total{param="wibble"} 1.0' in await reply.text()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "a", "wibble": 1, "annotations": [], "audio": None},
                    {"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}]},
                    {"role": "user", "content": "a", "wibble": 2},
                ],
                "stream": True,
                "stream_options": {"include_usage": True, "wobble": False},
            },
            "messages.wibble,messages.content.lang,stream_options.wobble",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}
                ],
                "reasoning": {"effort": "none", "depth": 3},
            },
            "input.content.x,reasoning.depth",
        ),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "max_tokens": 5,
                "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}],
            },
            "messages.content.x",
        ),
    ],
)
async def test_unknown_fields_inside_of_others_are_listed_too(
    serve: Serve, path: str, body: dict[str, Any], named: str
) -> None:
    url = await serve(FakeEngine())
    async with aiohttp.request("POST", url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["x-jaxserve-ignored-params"] == named


async def test_unknown_fields_of_a_constraint_are_refused_by_name(serve: Serve) -> None:
    url = await serve(FakeEngine())
    for path, body, param in (
        ("chat/completions", {"messages": MESSAGES, "response_format": FORM}, "response_format.x"),
        ("responses", {"input": "a", "text": {"format": FORM}}, "text.format.x"),
    ):
        status, error, _ = await post(url, f"/v1/{path}", json=body)
        assert (status, error["param"]) == (400, param)
