"""Who asks and does not read is not waited for, whatever is written to him."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from jaxserve.api import ReaderTooSlow
from jaxserve.server import connection
from tests.fakes import FakeEngine
from tests.server.conftest import Serve

ENDLESS = {"prompt": "Hi", "max_tokens": 10**6, "logprobs": 20}
TEXT = "a" * 2_000_000


@asynccontextmanager
async def asking(
    url: str, path: str, body: dict[str, Any], *, window: int = 4096
) -> AsyncGenerator[socket.socket]:
    """A connection with a request on its way; the system reads `window` bytes ahead."""
    loop, data = asyncio.get_running_loop(), json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, head.encode() + data)
        yield client


async def rest(client: socket.socket) -> bytes:
    """What comes until the other side ends the connection, in whatever way."""
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    try:
        while part := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 20):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_that_nobody_reads_is_aborted(serve: Serve, n: int) -> None:
    engine = FakeEngine(b"a" * 100_000, max_model_len=200_000)
    url = await serve(engine, write_timeout=0.5, keep_alive_interval=0.1)
    async with asking(url, "/v1/completions", {**ENDLESS, "n": n, "stream": True}) as client:
        await asyncio.wait_for(engine.aborted.wait(), 20)
        async with asyncio.timeout(5):
            while engine.running:
                await asyncio.sleep(0.01)
        assert not (await rest(client)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def open_answers(url: str) -> float:
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        (line,) = re.findall(r"^jaxserve_open_answers{.*} (.*)$", await reply.text(), re.MULTILINE)
    return float(line)


async def until_answers_are(number: int, url: str) -> None:
    async with asyncio.timeout(60):
        while await open_answers(url) != number:
            await asyncio.sleep(0.05)


async def test_an_answer_that_nobody_reads_is_dropped(serve: Serve) -> None:
    """On any route, and although it is complete."""
    url = await serve(FakeEngine(), write_timeout=1.0, max_request_bytes=2 * len(TEXT))
    async with asking(url, "/tokenize", {"prompt": TEXT}) as client:
        await until_answers_are(1, url)
        await until_answers_are(0, url)
        assert len(await rest(client)) < 2 * len(TEXT)


async def test_one_who_reads_slowly_gets_all(serve: Serve) -> None:
    """Though it takes several times as long as the write timeout."""
    url = await serve(FakeEngine(), write_timeout=0.5, max_request_bytes=2 * len(TEXT))
    loop, received = asyncio.get_running_loop(), b""
    async with asking(url, "/tokenize", {"prompt": TEXT}, window=200_000) as client:
        begun = loop.time()
        while not received.endswith(b"}"):
            part = await asyncio.wait_for(loop.sock_recv(client, 200_000), 20)
            assert part, "it was cut off"
            received += part
            await asyncio.sleep(0.05)
        assert loop.time() - begun > 1.5
    assert len(json.loads(received.partition(b"\r\n\r\n")[2])["tokens"]) == len(TEXT)


async def test_a_server_that_shuts_down_waits_less(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DRAINING_TIMEOUT", 0.5)
    engine = FakeEngine(b"a" * 100_000, max_model_len=200_000)
    url = await serve(engine, write_timeout=3600)
    async with asking(url, "/v1/completions", {**ENDLESS, "stream": True}):
        await asyncio.sleep(1.5)
        assert engine.running
        engine.phase = "draining"
        await asyncio.wait_for(engine.aborted.wait(), 20)


async def test_who_falls_far_behind_is_told_so(serve: Serve) -> None:
    url = await serve(FakeEngine(b"abc", fail_after=2, failure=ReaderTooSlow))
    body = {"prompt": "Hi", "stream": True}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert '"code":"slow_reader"' in await reply.text()
