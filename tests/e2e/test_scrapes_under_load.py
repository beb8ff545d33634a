"""Scrapes as often as llm-d's, of a server whose device and event loop have all they can do."""

from __future__ import annotations

import asyncio
import http.client
import time
from statistics import median

import aiohttp
import pytest

from tests.e2e.process import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PER_SECOND, SECONDS, STREAMS = 20, 20, 96
ROUTES = ("/version", "/metrics", "/metrics/routing")
"""The first one does next to nothing: what it takes is the machine's and the loop's."""
ADDED_MS = 5.0
"""What a scrape may take longer than that, in 99 of 100 cases."""


def scraped(url: str, found: dict[str, list[float]], end: float) -> None:
    """Milliseconds of each route, one after the other, each on a connection of its own."""
    address = url.removeprefix("http://")
    connections = {path: http.client.HTTPConnection(address, timeout=30) for path in ROUTES}
    while (begun := time.monotonic()) < end:
        for path, connection in connections.items():
            at = time.perf_counter()
            connection.request("GET", path)
            reply = connection.getresponse()
            assert reply.status == 200 and reply.read()
            found[path].append((time.perf_counter() - at) * 1e3)
        time.sleep(max(0.0, 1 / PER_SECOND - (time.monotonic() - begun)))


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
    body = {"prompt": f"{number} one two", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    while True:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200
            async for _ in reply.content.iter_any():
                pass


async def test_scrapes_cost_a_saturated_server_next_to_nothing() -> None:
    found: dict[str, list[float]] = {path: [] for path in ROUTES}
    with Server("--decode-buckets", "64") as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            streams = [asyncio.create_task(stream(session, server.url, n)) for n in range(STREAMS)]
            await asyncio.sleep(3)
            await asyncio.to_thread(scraped, server.url, found, time.monotonic() + SECONDS)
            assert (await server.load())["waiting"] > 0, "the server had time to spare"
            for task in streams:
                task.cancel()
    middle = {path: median(taken) for path, taken in found.items()}
    late = {path: sorted(taken)[len(taken) * 99 // 100] for path, taken in found.items()}
    print("p50", middle, "p99", late, "scrapes", len(found["/metrics"]))
    assert len(found["/metrics"]) > SECONDS * PER_SECOND / 4
    for path in ROUTES[1:]:
        assert middle[path] < middle["/version"] + ADDED_MS / 2, path
        assert late[path] < late["/version"] + ADDED_MS, path
