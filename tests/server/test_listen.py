"""Web pages of other origins, HTTP that is none, and numbers beyond all bounds."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app, make_runner
from jaxserve.server.access import digest
from jaxserve.startup.listen import bind, is_loopback, server_config
from jaxserve.tokenizer import decode
from jaxserve.weights.model_source import find_model
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve, serving

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


async def test_a_page_that_is_allowed_asks_first_and_without_a_key(serve: Serve) -> None:
    url = await serve(FakeEngine(), allowed_origins=(PAGE,), api_key_digests=(digest("k"),))
    target = f"{url}/v1/chat/completions"
    async with aiohttp.request("OPTIONS", target, headers=PREFLIGHT) as reply:
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization"
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
        assert reply.headers["Vary"] == "Origin"
    async with aiohttp.request("POST", target, headers={"Origin": PAGE}) as reply:
        assert reply.status == 401  # and the page may read why
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        shown = reply.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"X-Request-Id", "Retry-After", "Retry-After-Ms"} <= set(shown)


async def test_a_socket_is_served_and_taken_over_only_when_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    config = ServerConfig(model_names=("tiny",), uds=path)
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(path))
    left_behind.close()
    runner = make_runner(make_app(FakeEngine(), tiny_tokenizer(), config, Metrics("tiny")))
    await runner.setup()
    async with serving(FakeEngine(), uds=path) as url:
        assert url == "http://localhost"
        with pytest.raises(ConfigError, match="another process listens there"):
            await bind(runner, config)
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post("http://localhost/v1/completions", json={"prompt": "a"}) as reply,
        ):
            assert reply.status == 200
    with pytest.raises(ConfigError, match="cannot listen"):
        await bind(runner, ServerConfig(model_names=("tiny",), uds=tmp_path / "no" / "x.sock"))
    await runner.cleanup()


async def test_of_two_servers_that_start_at_once_one_gets_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.sock"
    config = ServerConfig(model_names=("tiny",), uds=path)
    ask = asyncio.open_unix_connection

    async def slowly(path: Path) -> Any:
        try:
            return await ask(path)
        finally:
            await asyncio.sleep(0.05)

    monkeypatch.setattr(asyncio, "open_unix_connection", slowly)
    for _ in range(2):  # the second time there is a socket that was left behind
        engines = FakeEngine(), FakeEngine()
        apps = [make_app(e, tiny_tokenizer(), config, Metrics("tiny")) for e in engines]
        runners = [make_runner(app, shutdown_timeout=0.2) for app in apps]
        try:
            for runner in runners:
                await runner.setup()
            told = await asyncio.gather(*(bind(r, config) for r in runners), return_exceptions=True)
            assert {type(each) for each in told} == {str, ConfigError}, told
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
                session.post("http://localhost/v1/completions", json={"prompt": "a"}) as reply,
            ):
                assert reply.status == 200
            winner = engines[[isinstance(each, str) for each in told].index(True)]
            assert winner.requests
        finally:
            for runner in runners:
                await runner.cleanup()


async def test_a_socket_that_may_not_be_asked_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another user, or one whose queue is full."""
    path = tmp_path / "server.sock"
    config = ServerConfig(model_names=("tiny",), uds=path)

    async def refused(_: Path) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    runner = make_runner(make_app(FakeEngine(), tiny_tokenizer(), config, Metrics("tiny")))
    await runner.setup()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        monkeypatch.setattr(asyncio, "open_unix_connection", refused)
        with pytest.raises(ConfigError, match=r"cannot listen: .*temporarily unavailable"):
            await bind(runner, config)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    await runner.cleanup()


async def test_a_chat_template_of_ones_own_goes_before_the_models(
    serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }} é ", encoding="utf-8")
    options = parse_args(["--chat-template", str(file)])
    config = server_config(options, find_model(options))
    url = await serve(engine := FakeEngine(), chat_template=config.chat_template)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
    assert decode(tiny_tokenizer(), engine.requests[0].prompt) == "Hi é "


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"{% if", "not a Jinja template: line 1"),
    ],
)
def test_a_chat_template_that_is_none_refuses_the_start(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    options = parse_args(["--chat-template", str(file)])
    with pytest.raises(ConfigError, match=reason):
        server_config(options, find_model(options))


def test_a_template_of_the_model_that_is_none_refuses_the_start_and_is_named() -> None:
    tokenizer = tiny_tokenizer("{% if %}")
    config = ServerConfig(model_names=("tiny",))
    with pytest.raises(ConfigError, match=r"the model's chat template .*: not a Jinja"):
        make_app(FakeEngine(), tokenizer, config, Metrics("tiny"))
    own = replace(config, chat_template="{{ messages[0].content }}")
    make_app(FakeEngine(), tokenizer, own, Metrics("tiny"))


@pytest.mark.parametrize("allowed", [(), ("https://other.example.org",), (PAGE + ":8443",)])
async def test_other_pages_get_no_leave(serve: Serve, allowed: tuple[str, ...]) -> None:
    url = await serve(FakeEngine(), allowed_origins=allowed)
    async with aiohttp.request("OPTIONS", f"{url}/v1/models", headers=PREFLIGHT) as reply:
        assert reply.status == 405
        assert "Access-Control-Allow-Origin" not in reply.headers


async def test_streams_may_be_read_by_any_page_if_all_are_allowed(serve: Serve) -> None:
    url = await serve(FakeEngine(), allowed_origins=("*",))
    body = {"prompt": "Hi", "stream": True}
    request = aiohttp.request("POST", f"{url}/v1/completions", json=body, headers={"Origin": PAGE})
    async with request as reply:
        assert reply.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in reply.headers


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health\0 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_a_400(
    serve: Serve, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    url = await serve(FakeEngine())
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_bytes)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    error = json.loads(await asyncio.wait_for(reader.read(), 5))["error"]
    writer.close()
    assert head.split()[1] == b"400", head
    assert b"\r\nServer: jaxserve\r\n" in head
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the request is not HTTP")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages", "/nothing"])
async def test_expectations_that_nobody_has_are_refused_in_our_words(
    serve: Serve, path: str
) -> None:
    headers = {"Expect": "tea"}
    async with aiohttp.request(
        "POST", f"{await serve(FakeEngine())}{path}", json={}, headers=headers
    ) as reply:
        assert (reply.status, reply.headers["Server"]) == (417, "jaxserve")
        error = (await reply.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert "100-continue" in error["message"]


PROMPT = b'{"prompt": "Hi", "max_tokens": 1}'
PACKED = gzip.compress(PROMPT, mtime=0)


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", PACKED, 200),
        ("GZIP", PACKED, 200),
        ("deflate", zlib.compress(PROMPT), 200),
        ("deflate", zlib.compress(PROMPT, wbits=-15), 200),
        ("identity", PROMPT, 200),
        ("gzip", PACKED[:-1], 400),
        ("gzip", PACKED[:-8], 400),  # all of the content is there
        ("gzip", PACKED[:-8] + bytes(8), 400),
        ("gzip", PACKED + PACKED, 400),
        ("deflate", zlib.compress(PROMPT)[:-1], 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(b" " * 10_000, mtime=0), 413),
        ("br", PROMPT, 415),
    ],
)
async def test_a_compressed_body_is_taken_if_it_is_whole(
    serve: Serve, coding: str, body: bytes, status: int
) -> None:
    url = f"{await serve(FakeEngine(), max_request_bytes=5000)}/v1/completions"
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    async with aiohttp.request("POST", url, data=io.BytesIO(body), headers=headers) as reply:
        assert reply.status == status, await reply.text()


@pytest.mark.parametrize("body", [b"{}", gzip.compress(b"{}" * 99, mtime=0)[:-9]])
@pytest.mark.parametrize(("kind", "status"), [("application/json", 400), ("text/plain", 415)])
async def test_a_body_that_cannot_be_unpacked_is_the_clients_affair(
    serve: Serve, caplog: pytest.LogCaptureFixture, body: bytes, kind: str, status: int
) -> None:
    url = f"{await serve(FakeEngine())}/v1/completions"
    headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
    async with aiohttp.request("POST", url, data=io.BytesIO(body), headers=headers) as reply:
        assert reply.status == status, await reply.text()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "fields",
    [
        '"temperature": NaN',
        '"temperature": Infinity',
        '"temperature": 1e999',
        '"top_p": -Infinity',
        '"seed": 1' + "0" * 400,
        '"max_tokens": 1' + "0" * 5000,
        '"max_tokens": -1e308',
        '"stop_token_ids": [99999999999999999999]',
        '"logit_bias": {"1": 1e400}',
        '"logit_bias": {"99999999999999999999999": 1}',
        '"prompt": [1e3000]',
        '"stop": "\\ud800"',
        '"prompt": "\\ud800"',
        '"cache_salt": "a\\u0000b"',
        '"n": 9223372036854775808',
        '"logprobs": 1e20',
    ],
)
async def test_numbers_and_text_beyond_all_bounds_are_400s(serve: Serve, fields: str) -> None:
    url = await serve(engine := FakeEngine())
    body = '{"prompt": "Hi", ' + fields + "}"
    headers = {"Content-Type": "application/json"}
    async with aiohttp.request(
        "POST", f"{url}/v1/completions", data=body, headers=headers
    ) as reply:
        assert reply.status == 400, await reply.text()
        assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}
    assert not engine.requests
