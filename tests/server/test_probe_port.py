"""A port for probes answers whatever the loop of the API does, and says when that loop stands."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from jaxserve.config import ConfigError, ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.server import make_app
from jaxserve.server.access import digest
from jaxserve.server.service import SERVICE
from jaxserve.startup.probe_port import BEAT_SECONDS, probe_port
from tests.fakes import FakeEngine, tiny_tokenizer


@asynccontextmanager
async def probes(engine: FakeEngine, **settings: Any) -> AsyncIterator[str]:
    config = ServerConfig(model_names=("tiny",), api_key_digests=(digest("key"),), **settings)
    app = make_app(engine, tiny_tokenizer(), config, Metrics("tiny"))
    async with probe_port(app[SERVICE], "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"


async def status(url: str) -> int:
    async with aiohttp.request("GET", url) as reply:
        await reply.read()
        return reply.status


async def test_probes_and_scrapes_need_no_key_and_nothing_else_is_there() -> None:
    engine = FakeEngine()
    async with probes(engine) as url:
        for path in ("/health", "/live", "/ready", "/metrics", "/metrics/routing"):
            assert await status(url + path) == 200
        for path in ("/", "/v1/models", "/load", "/openapi.json"):
            assert await status(url + path) == 404
        async with aiohttp.request("GET", f"{url}/metrics") as reply:
            assert reply.headers["Server"] == "jaxserve"
            assert 'jaxserve_open_answers{engine="0",model_name="tiny"} 0.0' in await reply.text()
        engine.phase = "compiling"
        assert [await status(url + path) for path in ("/health", "/ready", "/live")] == [
            *(503, 503, 200)
        ]
        # A token would be made by the loop that may be busy.
        engine.phase = "serving"
        assert await status(f"{url}/health?deep=1") == 200 and not engine.requests


def ask(url: str) -> tuple[bytes, float]:
    """Status line and seconds, without an event loop."""
    host, port = url.removeprefix("http://").split(":")
    begun = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = connection.recv(64).partition(b"\r\n")[0]
    return line, time.monotonic() - begun


def stand_still(seconds: float) -> None:
    """As a large computation in Python does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


async def beside(url: str, busy: Callable[[], None]) -> list[tuple[bytes, float]]:
    """What ten probes get while the loop does nothing else than `busy`."""
    asking = asyncio.get_running_loop().run_in_executor(None, lambda: [ask(url) for _ in range(10)])
    busy()
    return await asking


async def test_probes_are_answered_while_the_loop_is_busy() -> None:
    async with probes(FakeEngine()) as url:
        await asyncio.to_thread(ask, url)
        answers = await beside(url, lambda: stand_still(1.5))
    assert all(line == b"HTTP/1.1 200 OK" for line, _ in answers)
    assert sorted(seconds for _, seconds in answers)[5] < 0.5


async def test_a_loop_that_stands_still_for_too_long_is_not_alive() -> None:
    async with probes(FakeEngine(), stall_timeout=BEAT_SECONDS * 2) as url:
        assert (await asyncio.to_thread(ask, url))[0] == b"HTTP/1.1 200 OK"
        asking = asyncio.create_task(asyncio.to_thread(lambda: (time.sleep(1.4), ask(url))[1]))
        await asyncio.sleep(0.05)
        stand_still(2.0)
        assert (await asking)[0] == b"HTTP/1.1 503 Service Unavailable"
        await asyncio.sleep(BEAT_SECONDS * 1.5)
        assert (await asyncio.to_thread(ask, url))[0] == b"HTTP/1.1 200 OK"


async def test_a_port_in_use_is_named() -> None:
    async with probes(FakeEngine()) as url:
        app = make_app(
            FakeEngine(), tiny_tokenizer(), ServerConfig(model_names=("a",)), Metrics("a")
        )
        with pytest.raises(ConfigError, match="choose another with --probe-port"):
            async with probe_port(app[SERVICE], "127.0.0.1", int(url.rpartition(":")[2])):
                pass
