"""Every request field that is known: values that are taken, values that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import pytest

from jaxserve.server.request.schema import ChatRequest, CompletionRequest, field_names
from jaxserve.server.request.unsupported import REJECTED, SILENT
from tests.fakes import FakeEngine
from tests.server.conftest import Serve

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BIG = 10**30
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def nested(depth: int) -> dict[str, Any]:
    """A response format whose schema is nested that deeply."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "json_schema", "json_schema": {"schema": schema}}


class Field(NamedTuple):
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    beside: Mapping[str, Any] = MappingProxyType({})
    """Fields that it needs."""


def flag(**beside: Any) -> Field:
    return Field((True, False), (1, "yes", [], BIG), beside)


def whole(low: int, high: int, *, also: tuple[int, ...] = ()) -> Field:
    return Field((low, high, *also), (low - 1 if not also else -7, high + 1, 1.5, "1", True, BIG))


INT64 = whole(-(2**63), 2**63 - 1)
COMMON = {
    "model": Field(("tiny", "alias"), (1, [])),
    "stream": flag(),
    "stream_options": Field(
        (
            {"include_usage": True},
            {"continuous_usage_stats": False},
            {"include_obfuscation": True},
        ),
        ({"include_usage": 1}, 1),
        {"stream": True},
    ),
    "n": whole(1, 128),
    "best_of": Field((1,), (0, 2, 129, "1")),
    "max_tokens": Field((1, 7, 10**9), (0, -1, 1.5, "1", True)),
    "min_tokens": Field((0, 5), (-1, 11, 1.5, "1"), {"max_tokens": 10}),
    "temperature": Field((0, 0.0, 1, 2.0), (-0.1, 2.1, "1", True, BIG)),
    "top_p": Field((0.01, 1), (0, 1.1, "1", BIG)),
    "top_k": Field((-1, 0, 5, 10**6), (-2, 1.5, "1")),
    "min_p": Field((0, 0.5, 1), (-0.1, 1.1, "1")),
    "presence_penalty": Field((-2, 0, 0.5, 2), (-2.1, 2.1, "1", BIG)),
    "frequency_penalty": Field((-2, 0, 0.5, 2), (-2.1, 2.1, "1", BIG)),
    "repetition_penalty": Field((0.1, 1, 1.3, 1000), (0, -1, 1001, "1", BIG)),
    "logit_bias": Field(
        ({}, {"5": -100, "299": 100.0}),
        ({"a": 1}, {"300": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"9" * 5000: 1}, {"٣": 1}, [], 1),
    ),
    "allowed_token_ids": Field(([1], [5, 5, 7]), ([], [-1], [300], ["1"], 1, [BIG])),
    "bad_words": Field(
        ([], ["a", " b"], ["w"] * 128), ([""], ["w" * 257], ["w"] * 129, ["w", 1], "w", {})
    ),
    "thinking_token_budget": Field((0, 100), (-1, 1.5, "1", True, BIG)),
    "response_format": Field(
        (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        ),
        (
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}},
            {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
            {"type": "structural_tag"},
            {"type": "json_object", "schema": SCHEMA},
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "stric": True}},
            nested(100),
            "json",
        ),
    ),
    "structured_outputs": Field(
        (
            {"json": SCHEMA},
            {"json": '{"type": "object"}'},
            {"json_object": True},
            {"regex": "[a-z]+"},
            {"choice": ["a", "b"]},
            {"grammar": 'start: "a"'},
        ),
        (
            {},
            {"json": "", "regex": None},
            {"json": "[]"},
            {"json": False},
            {"json_object": False},
            {"regex": "("},
            {"choice": []},
            {"choice": [1]},
            {"grammar": "start: b"},
            {"regex": "a", "choice": ["a"]},
            {"structural_tag": "x"},
            {"frobnicate": 1},
        ),
    ),
    "guided_json": Field((SCHEMA, '{"type": "object"}'), ({"type": "frob"}, "", 1)),
    "guided_regex": Field(("a|b",), ("(", "", 1)),
    "guided_choice": Field((["a", "é"],), ([], "a")),
    "guided_grammar": Field(('start: "a"', 'root ::= "a"'), ("start: b", "x ::= (", "")),
    "regex": Field(("a|b",), ("(", "", 1)),
    "ebnf": Field(('root ::= "a"',), ("x ::= (", "")),
    "grammar": Field(('root ::= "a"',), ("x ::= (", "")),
    "seed": INT64,
    "stop": Field(
        ("a", ["a"], ["a", "b", "c", "d"], []), ("", [""], ["a"] * 5, 1, [1], "x" * 5000)
    ),
    "stop_token_ids": Field(([], [1, 2]), ([-1], [300], ["1"], 1, [BIG], [1] * 300)),
    "include_stop_str_in_output": flag(),
    "ignore_eos": flag(),
    "skip_special_tokens": flag(),
    "return_token_ids": flag(),
    "prompt_logprobs": Field((0, 5, 20), (-1, 21, 1.5, True)),
    "priority": INT64,
    "service_tier": Field(("auto", "flex", "fast"), ("cheap", 1, "")),
    "cache_salt": Field(("a", "x" * 128, "é"), ("", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 1)),
    "request_id": Field(("mine", "x" * 256, " ~"), ("", "x" * 257, "a\n", "é", "\x7f", 1)),
    "truncate_prompt_tokens": Field((-1, 1, 4000), (0, -2, 4096, 10**9, 1.5, "1")),
    "truncation_side": Field(("left", "right"), ("middle", 1)),
}
COMPLETION = {
    "prompt": Field(
        ("a", ["a", "b"], [1, 2], [[1], [2]]),
        (1, "", [], [[]], ["a", 1], [-1], [300], [BIG], [1.5], [True], {"a": 1}),
    ),
    "echo": flag(),
    "logprobs": Field((0, 5, 20), (-1, 21, 1.5, True)),
}
CHAT = {
    "messages": Field(
        (
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            [{"role": "developer", "content": "a"}, {"role": "user", "content": "a", "name": "b"}],
        ),
        (
            [],
            "a",
            [1],
            [{"role": "king", "content": "a"}],
            [{"role": "user"}],
            [{"content": "a"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
    ),
    "max_completion_tokens": Field((1, 7, 10**9), (0, -1, 1.5, "1")),
    "logprobs": flag(),
    "top_logprobs": Field((0, 5, 20), (-1, 21, 1.5), {"logprobs": True}),
    "tools": Field(([TOOL], [], [{"type": "other"}]), ([1], [{}], [TOOL] * 129, {})),
    "tool_choice": Field(
        ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
        ("sometimes", 1, {}, {"type": "function", "function": {"name": "g"}}),
        {"tools": [TOOL]},
    ),
    "parallel_tool_calls": flag(tools=[TOOL]),
    "enable_thinking": flag(),
    "reasoning_effort": Field(("none", "low", "high", "max"), ("huge", 1, 0.5)),
    "include_reasoning": flag(),
    "chat_template_kwargs": Field(
        ({}, {"enable_thinking": False}), ({"x": 1}, {"enable_thinking": []}, [], 1)
    ),
    "add_generation_prompt": flag(),
    "continue_final_message": Field((False,), (True, 1)),
    "prediction": Field(
        ({"type": "content", "content": "a"},), ({"type": "a", "content": "a"}, {}, "a", 1)
    ),
}
ROUTES: dict[str, tuple[type, dict[str, Field], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, COMMON | COMPLETION, {"prompt": "abc"}),
    "/v1/chat/completions": (
        ChatRequest,
        COMMON | CHAT,
        {"messages": [{"role": "user", "content": "Hi"}]},
    ),
}


async def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.request("POST", url + path, json=body) as reply:
        streamed = reply.content_type == "text/event-stream"
        return reply.status, None if streamed else await reply.json()


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_that_is_understood_is_in_this_table(path: str) -> None:
    kind, fields, _ = ROUTES[path]
    assert fields.keys() == field_names(kind)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_field_takes_its_range_and_nothing_else(serve: Serve, path: str) -> None:
    _, fields, plain = ROUTES[path]
    url = await serve(FakeEngine(b"Hi"))
    for name, field in fields.items():
        needed = name in plain
        for value in (*field.good, *(() if needed else (None,))):
            status, reply = await post(url, path, {**plain, **field.beside, name: value})
            assert status == 200, (name, value, reply)
        for value in field.bad:
            status, reply = await post(url, path, {**plain, **field.beside, name: value})
            assert status == 400, (name, value, reply)
            if abs(value) < 2**63 if isinstance(value, int) else True:
                assert str(reply["error"]["param"]).startswith(name), (name, value, reply)


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_that_are_not_supported_are_refused_unless_they_ask_for_nothing(
    serve: Serve, path: str
) -> None:
    kind, _, plain = ROUTES[path]
    url = await serve(FakeEngine(b"Hi"))
    assert not REJECTED.keys() & field_names(kind)
    for name, harmless in REJECTED.items():
        for value in (None, *harmless):
            status, reply = await post(url, path, {**plain, name: value})
            assert status == 200, (name, value, reply)
        status, reply = await post(url, path, {**plain, name: {"any": "thing"}})
        assert (status, reply["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_without_effect_are_taken_and_unknown_ones_are_named(
    serve: Serve, path: str
) -> None:
    _, _, plain = ROUTES[path]
    url = await serve(FakeEngine(b"Hi"))
    body = plain | dict.fromkeys(SILENT, "x") | {"temprature": 1, "nonsense": None}
    async with aiohttp.request("POST", url + path, json=body) as reply:
        assert reply.status == 200
        assert reply.headers["x-jaxserve-ignored-params"] == "temprature,nonsense"


async def test_priority_salt_and_truncation_reach_the_engine(serve: Serve) -> None:
    engine = FakeEngine(b"Hi", max_model_len=20)
    url = await serve(engine)
    long = {"prompt": list(range(30)), "priority": -3, "cache_salt": "s", "max_tokens": 4}
    for keep, side in ((5, "left"), (5, "right"), (-1, None)):
        body = {**long, "truncate_prompt_tokens": keep, "truncation_side": side}
        assert (await post(url, "/v1/completions", body))[0] == 200
    assert [request.prompt for request in engine.requests] == [
        (25, 26, 27, 28, 29),
        (0, 1, 2, 3, 4),
        tuple(range(14, 30)),
    ]
    assert {(r.priority, r.cache_salt) for r in engine.requests} == {(-3, "s")}
    assert (await post(url, "/v1/completions", long))[0] == 400


@pytest.mark.parametrize(
    ("fields", "header", "level", "tier"),
    [
        ({"service_tier": "flex"}, None, 1, "flex"),
        ({"service_tier": "priority"}, None, -1, "priority"),
        ({"service_tier": "auto"}, None, 0, "default"),
        ({"service_tier": "flex", "priority": 7}, None, 7, "default"),
        ({"service_tier": "flex"}, "-5", -5, "default"),
        ({"priority": 3}, "-5", -5, None),
        ({}, None, 0, None),
    ],
)
async def test_the_tier_is_a_priority_and_a_proxys_goes_before(
    serve: Serve, fields: dict[str, Any], header: str | None, level: int, tier: str | None
) -> None:
    engine = FakeEngine(b"Hi")
    url = await serve(engine, by_priority=True)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    bodies: dict[str, Any] = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}
    headers = {"X-Vllm-Priority": header} if header else {}
    for route, plain in (bodies | {"chat/completions": chat}).items():
        body = plain | fields
        async with aiohttp.request(
            "POST", f"{url}/v1/{route}", json=body, headers=headers
        ) as reply:
            assert reply.status == 200
            assert (await reply.json()).get("service_tier") == tier
    assert {request.priority for request in engine.requests} == {level}


async def test_a_tier_that_makes_no_difference_is_the_default_one(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi"))
    _, answer = await post(url, "/v1/completions", {"prompt": "a", "service_tier": "priority"})
    assert answer["service_tier"] == "default"


@pytest.mark.parametrize("given", ["", "1.5", "high", "1_0", str(2**63)])
async def test_a_priority_that_is_no_integer_is_refused(serve: Serve, given: str) -> None:
    url = await serve(FakeEngine())
    headers = {"X-Vllm-Priority": given}
    async with aiohttp.request(
        "POST", f"{url}/v1/completions", json={"prompt": "a"}, headers=headers
    ) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "X-Vllm-Priority"


async def test_allowed_tokens_of_which_none_can_be_generated_are_refused(serve: Serve) -> None:
    """A model's vocabulary may end with ids of no token."""
    engine = FakeEngine(b"a", vocab_size=300, sampled_vocab=280)
    url = await serve(engine)
    for allowed, status in (([279, 280], 200), ([280], 400), ([299, 285], 400)):
        body = {"prompt": "a", "allowed_token_ids": allowed}
        got, answer = await post(url, "/v1/completions", body)
        assert got == status
        assert status == 200 or "0 to 279" in answer["error"]["message"]
    assert len(engine.requests) == 1


async def test_best_of_is_n_or_nothing(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi"))
    assert (await post(url, "/v1/completions", {"prompt": "a", "n": 2, "best_of": 2}))[0] == 200
    assert (await post(url, "/v1/completions", {"prompt": "a", "n": 2, "best_of": 3}))[0] == 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}] * 4097},
            "messages",
        ),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ("/v1/completions", {"allowed_token_ids": [1] * 65537}, "allowed_token_ids"),
        ("/v1/completions", {"stop": "a" * 4097}, "stop"),
        ("/v1/completions", {"guided_choice": ["a"] * 1025}, "guided_choice"),
        ("/v1/completions", {"guided_choice": ["a" * 4097]}, "guided_choice"),
        ("/v1/completions", {"guided_regex": "a" * (256 * 1024 + 1)}, "guided_regex"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
    ],
)
async def test_what_has_no_end_has_a_bound(
    serve: Serve, path: str, fields: dict[str, Any], param: str
) -> None:
    engine = FakeEngine(b"Hi")
    url = await serve(engine)
    plain = {"model": "tiny", "max_tokens": 1, "prompt": "a", "messages": [], "input": "a"}
    status, reply = await post(url, path, {**plain, **fields})
    assert status == 400 and not engine.requests
    named = reply["error"].get("param") or reply["error"]["message"]
    assert str(named).startswith(param)


async def test_clients_cannot_make_any_number_of_metrics(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi"))
    for many in range(2):
        names = {f"name{many}_{number}": 1 for number in range(60)}
        assert (await post(url, "/v1/completions", {"prompt": "a", **names}))[0] == 200
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    counted = [line for line in lines if line.startswith("jaxserve_ignored_params_total")]
    assert len(counted) == 64 + 1
    assert 'jaxserve_ignored_params_total{param="other"} 56.0' in counted
