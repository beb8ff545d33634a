"""/openapi.json is true: of every route, of requests and of answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app
from jaxserve.server.access import ADMIN_ROUTES, digest
from jaxserve.server.openapi import OPERATIONS
from jaxserve.server.ui import EVENTS_ROUTE, OPEN_PAGES
from tests.fakes import END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve

CONFIG = Path(__file__).with_name("schemathesis.toml")
USER = [{"role": "user", "content": "Hi"}]
KEYED: dict[str, Any] = {
    "api_key_digests": (digest("key"),),
    "admin_key_digests": (digest("admin-key"),),
}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_every_route_is_described_and_nothing_else() -> None:
    config = ServerConfig(model_names=("tiny",), **KEYED)
    app = make_app(FakeEngine(), tiny_tokenizer(), config, Metrics("tiny"))
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    pages = {("get", path) for path in (*OPEN_PAGES, EVENTS_ROUTE)}
    assert routes - pages == set(OPERATIONS)
    assert pages <= routes


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 3}),
    ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "n": 2}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": USER, "return_token_ids": True, "max_tokens": 5}),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "metadata": {"a": "b"}}),
    (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 99,
            "model": "tiny",
            "tools": [{"name": "f", "input_schema": {}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    ("/v1/messages", {"messages": USER, "max_tokens": 3, "model": "tiny"}),
    ("/v1/messages/count_tokens", {"messages": USER, "model": "tiny"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/chat/completions/render", {"messages": USER, "tools": [TOOL], "logprobs": True}),
    ("/v1/completions/render", {"prompt": ["a", "bc"], "stop": "x", "n": 2, "logprobs": 1}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_answers_have_the_shape_that_is_described(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    script = [THINK, *b"hm", END_THINK, *f"Well{CALL}".encode(), IM_END]
    url = await serve(FakeEngine(script))
    operation = OPERATIONS["post", path]
    async with aiohttp.request("POST", url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        kind: Any = operation.answer
        msgspec.json.decode(await reply.read(), type=list[kind] if operation.many else kind)
    async with aiohttp.request("POST", url + path, json=body | {"model": "other"}) as reply:
        assert reply.status == 404
        msgspec.json.decode(await reply.read(), type=operation.error)
    async with aiohttp.request("POST", url + path, data=b"{") as reply:
        assert reply.status == 415
        msgspec.json.decode(await reply.read(), type=operation.error)


async def test_what_can_be_asked_without_a_body_has_its_shape_too(serve: Serve) -> None:
    url = await serve(FakeEngine())
    for (method, path), operation in OPERATIONS.items():
        if path in ADMIN_ROUTES:
            continue
        if method == "get" and operation.answer is not None and "{response_id}" not in path:
            async with aiohttp.request("GET", url + path.format(model="tiny")) as reply:
                assert reply.status == 200
                msgspec.json.decode(await reply.read(), type=operation.answer)


async def fuzz(url: str, folder: Path, *options: str) -> None:
    """schemathesis: valid and invalid bodies, odd headers and methods, NULs; every check on."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
        *("run", f"{url}/openapi.json", "--checks", "all", "--no-color", "--seed", "1", *options),
        *("--header", "Authorization: Bearer admin-key"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,  # where it keeps what it found
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]


async def test_no_request_breaks_the_server_or_its_description(
    serve: Serve, tmp_path: Path
) -> None:
    url = await serve(FakeEngine([*b"Hi", IM_END]), **KEYED)
    await fuzz(url, tmp_path, "--phases", "fuzzing", "--max-examples", "4")


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_no_request_of_many_breaks_the_server_or_its_description(
    serve: Serve, tmp_path: Path
) -> None:
    url = await serve(FakeEngine([*b"Hi", IM_END]), **KEYED)
    await fuzz(
        url, tmp_path, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "200"
    )


async def test_the_description_says_which_values_are_taken(serve: Serve) -> None:
    url = await serve(FakeEngine())
    async with aiohttp.request("GET", f"{url}/openapi.json") as reply:
        described = json.loads(await reply.read())
    chat = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["model"] == {"enum": ["tiny", "alias", None]}
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert chat["audio"] == {"enum": [None]}


async def test_the_description_of_admin_routes_says_which_values_are_taken(serve: Serve) -> None:
    """New weights have the name of a checkpoint, not one of the served names."""
    url = await serve(FakeEngine(), **KEYED)
    headers = {"Authorization": "Bearer admin-key"}
    async with aiohttp.request("GET", f"{url}/openapi.json", headers=headers) as reply:
        described = json.loads(await reply.read())
    weights = described["components"]["schemas"]["WeightsRequest"]["properties"]
    assert weights["model"] == {"type": "string"}
    (mode,) = described["paths"]["/pause"]["post"]["parameters"]
    (level,) = described["paths"]["/sleep"]["post"]["parameters"]
    assert (mode["schema"], level["schema"]) == ({"enum": ["keep", "wait"]}, {"enum": ["1", "2"]})


async def test_the_description_says_which_routes_need_a_key(serve: Serve) -> None:
    url = await serve(FakeEngine(), **KEYED, open_metrics=True)
    headers = {"x-api-key": "key"}
    async with aiohttp.request("GET", f"{url}/openapi.json", headers=headers) as reply:
        paths = json.loads(await reply.read())["paths"]
    for (method, path), operation in OPERATIONS.items():
        described = paths[path][method]
        is_open = path in ("/health", "/live", "/ready", "/metrics", "/metrics/routing")
        assert bool(described["security"]) != is_open, path
        assert ("401" in described["responses"]) != is_open, path
        assert ("403" in described["responses"]) == (path in ADMIN_ROUTES), path
        assert operation.summary == described["summary"]
    url = await serve(FakeEngine())
    async with aiohttp.request("GET", f"{url}/openapi.json") as reply:
        paths = json.loads(await reply.read())["paths"]
    assert not ADMIN_ROUTES & paths.keys()
    assert not any(each["security"] for path in paths.values() for each in path.values())
