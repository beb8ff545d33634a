"""With keys, nothing but health answers without one: routes of today, of tomorrow and of nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app
from jaxserve.server.access import digest
from jaxserve.server.ui import OPEN_PAGES
from jaxserve.startup.listen import admin_api_keys, api_keys
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve

KEYS = ("first-key", "second-key")
KEYED: dict[str, Any] = {"api_key_digests": tuple(map(digest, KEYS))}
ADMIN: dict[str, Any] = {"admin_key_digests": (digest("admin-key"),)}
OPEN = {
    (method, path.replace("{file}", "chat.js"))
    for path in ("/health", "/live", "/ready", *OPEN_PAGES)
    for method in ("GET", "HEAD")
}


def registered_routes() -> list[tuple[str, str]]:
    config = ServerConfig(model_names=("tiny",), **ADMIN)
    app = make_app(FakeEngine(), tiny_tokenizer(), config, Metrics("tiny"))
    routes: list[tuple[str, str]] = []
    for route in app.router.routes():
        assert isinstance(route.resource, web.Resource)
        path = route.resource.canonical.replace("{model}", "tiny").replace("{file}", "chat.js")
        routes.append((route.method, path))
    return routes


async def status(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    async with aiohttp.request(method, url + path, headers=headers) as reply:
        return reply.status


async def test_every_route_but_health_needs_a_key(serve: Serve) -> None:
    url = await serve(FakeEngine(), **KEYED, **ADMIN)
    routes = registered_routes()
    assert len(routes) > 20
    assert set(routes) >= OPEN
    for method, path in routes:
        without = await status(url, method, path)
        assert (without != 401) == ((method, path) in OPEN), (method, path)
        assert await status(url, method, path, {"x-api-key": KEYS[1]}) != 401, (method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("GET", "/docs"),
        ("GET", "/ui"),
        ("GET", "/ui/engine/"),
        ("GET", "/ui/engine/events"),
        ("GET", "/ui/chat.js/x"),
        ("GET", "/health/../v1/models"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/v1/models?path=/health"),
        ("GET", "/v1/models/health"),
        ("POST", "/health"),
        ("OPTIONS", "/v1/chat/completions"),
        ("TRACE", "/v1/models"),
    ],
)
async def test_what_looks_like_health_is_not(serve: Serve, method: str, path: str) -> None:
    url = await serve(FakeEngine(), **KEYED)
    assert await status(url, method, path) == 401
    assert await status(url, method, path, {"Host": "localhost/health"}) == 401


@pytest.mark.parametrize("clients", [{}, KEYED])
async def test_routes_of_administrators_need_their_key_and_do_not_exist_without_any(
    serve: Serve, clients: dict[str, Any]
) -> None:
    url = await serve(engine := FakeEngine(), **clients, **ADMIN)
    path = "/reset_prefix_cache"
    assert await status(url, "POST", path) == 401
    assert await status(url, "POST", path, {"x-api-key": "other"}) == 401
    if clients:
        assert await status(url, "POST", path, {"x-api-key": KEYS[0]}) == 403
    assert engine.prefix_cache_resets == 0
    for method, route in (("POST", path), ("GET", "/v1/models")):
        assert await status(url, method, route, {"Authorization": "Bearer admin-key"}) == 200
    assert engine.prefix_cache_resets == 1
    url = await serve(FakeEngine(), **clients)
    assert await status(url, "POST", path, {"x-api-key": KEYS[0]}) == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer   second-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "Bearer of-a-proxy", "x-api-key": "first-key"},
    ],
)
async def test_a_key_lets_in(serve: Serve, headers: dict[str, str]) -> None:
    url = await serve(FakeEngine(), **KEYED)
    assert await status(url, "GET", "/v1/models", headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Bearer FIRST-KEY"},
        {"Authorization": "Bearer first-key,second-key"},
        {"Authorization": "Bearer \u00e9\u4e2d"},
        {"x-api-key": "Bearer first-key"},
        {"x-api-key": ""},
    ],
)
async def test_anything_else_does_not(serve: Serve, headers: dict[str, str]) -> None:
    url = await serve(FakeEngine(), **KEYED)
    async with aiohttp.request("GET", f"{url}/v1/models", headers=headers) as reply:
        assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
        error = (await reply.json())["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert "first" not in error["message"]


async def test_the_messages_api_refuses_in_its_own_words(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(), **KEYED)
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    async with aiohttp.request("POST", f"{url}/v1/messages", json=body) as reply:
        answer = await reply.json()
    assert (reply.status, answer["type"]) == (401, "error")
    assert answer["error"]["type"] == "authentication_error"
    assert not engine.requests


async def test_a_key_is_one_tenant_however_it_is_sent(serve: Serve) -> None:
    url = await serve(engine := FakeEngine(), **KEYED)
    headers = [
        {"Authorization": "Bearer first-key"},
        {"x-api-key": "first-key", "Authorization": "Bearer of-a-proxy"},
        {"x-api-key": "second-key"},
    ]
    for one in headers:
        body = {"prompt": "Hi"}
        async with aiohttp.request("POST", f"{url}/v1/completions", json=body, headers=one) as it:
            assert it.status == 200
    first, again, other = [request.tenant for request in engine.requests]
    assert first == again != other


@pytest.mark.parametrize(("settings", "status"), [({}, b"200"), (KEYED, b"401")])
async def test_a_header_that_is_not_text_is_no_error(
    serve: Serve, settings: dict[str, Any], status: bytes
) -> None:
    url = await serve(FakeEngine(), **settings)
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\n"
        b'Content-Length: 15\r\n\r\n{"prompt":"Hi"}'
    )
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
    writer.close()


async def test_metrics_are_open_only_on_demand(serve: Serve) -> None:
    url = await serve(FakeEngine(), **KEYED, open_metrics=True)
    assert await status(url, "GET", "/v1/models") == 401
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        text = await reply.text()
    sample = 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="unauthorized"}'
    assert f"{sample} 1.0" in text


def test_keys_come_from_flags_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nfrom-file \nshared\n")
    monkeypatch.setenv("JAXSERVE_API_KEY", "from-environment")
    flags = ["--api-key", "a", "b", "--api-key", "shared", "--api-key-file", str(file)]
    options = parse_args(flags)
    assert admin_api_keys(options) == []
    monkeypatch.setenv("JAXSERVE_ADMIN_API_KEY", "root")
    assert admin_api_keys(options) == ["root"]
    assert api_keys(options) == ["a", "b", "shared", "from-file", "from-environment"]
    assert "shared" not in repr(options)


@pytest.mark.parametrize(
    ("content", "environment", "flags"),
    [
        ("# nothing\n", None, []),
        (None, None, []),
        ("key", "", []),
        ("key", None, ["--api-key", ""]),
        ("two words", None, []),
        ("k\u00e9y", None, []),
    ],
)
def test_keys_that_would_let_everybody_or_nobody_in_refuse_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    environment: str | None,
    flags: list[str],
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    if environment is not None:
        monkeypatch.setenv("JAXSERVE_API_KEY", environment)
    with pytest.raises(ConfigError, match="key"):
        api_keys(parse_args([*flags, "--api-key-file", str(file)]))


async def test_under_a_root_path_the_same_keys_count(serve: Serve) -> None:
    keys = {"api_key_digests": (digest("k"),), "admin_key_digests": (digest("a"),)}
    url = await serve(FakeEngine(b"Hi"), root_path="/llm", **keys)
    client, admin = ({"x-api-key": key} for key in "ka")
    for root in ("", "/llm"):
        assert await status(url, "GET", f"{root}/health") == 200
        for method, path in registered_routes():
            if (method, path) not in OPEN:
                assert await status(url, method, root + path) == 401
        assert await status(url, "GET", f"{root}/v1/models", client) == 200
        assert await status(url, "POST", f"{root}/reset_prefix_cache", client) == 403
        assert await status(url, "POST", f"{root}/reset_prefix_cache", admin) == 200
        async with aiohttp.request("POST", f"{url}{root}/v1/messages") as reply:
            assert (await reply.json())["type"] == "error", "in Anthropic's shape"
    assert await status(url, "GET", "/llm/llm/health", client) == 404
    async with aiohttp.request("GET", f"{url}/llm/openapi.json", headers=client) as reply:
        assert (await reply.json())["servers"] == [{"url": "/llm"}]
