"""Routers that people run, from the package index, each in an environment of its own, in front of
two replicas: one that serves and one that still compiles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.e2e.process import Server, read_until, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "jaxserve-embedded"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 4 + 3?"}],
    "max_tokens": 8,
    "temperature": 0,
}
INSTALL_SECONDS = 300


class Router(NamedTuple):
    package: str
    command: tuple[str, ...]
    notices: float = 0.0
    """Seconds until it has found out which replicas serve; it first takes all for such."""


EVERY_2_SECONDS = ("--worker-startup-check-interval", "2", "--health-check-interval-secs", "2")
ROUTERS = {
    "smg": Router("smg==1.13.0", ("smg", "launch", *EVERY_2_SECONDS)),
    "sglang-router": Router("sglang-router==0.3.2", ("sglang-router", "launch", *EVERY_2_SECONDS)),
    # Three checks must fail.
    "vllm-router": Router("vllm-router==0.1.17", ("vllm-router", *EVERY_2_SECONDS), 10.0),
}


@pytest.fixture(scope="module", params=ROUTERS)
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Router, Path]:
    """A router, and the folder of its programs."""
    router, folder = ROUTERS[request.param], tmp_path_factory.mktemp("router")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", router.package]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{router.package} did not install in {INSTALL_SECONDS} s")
    if done.returncode:
        said = (done.stderr.strip() or "no reason given").splitlines()
        pytest.skip(f"{router.package} does not install here: {said[-1]}")
    return router, folder / "bin"


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """One that serves, and the URL of one that has programs to compile first: those of all buckets,
    which takes longer than any router needs to notice."""
    with ExitStack() as stack:
        serving = stack.enter_context(Server())
        process = start("--cache-dir", str(tmp_path / "empty"))
        stack.callback(process.communicate)
        stack.callback(process.kill)
        yield serving, read_until(process, r"listening on (http[^;\s]+)")[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@asynccontextmanager
async def running(
    program: tuple[Router, Path], folder: Path, *urls: str
) -> AsyncIterator[tuple[str, Path]]:
    """Gives the router's URL and its log, once it answers."""
    router, programs = program
    port, log = free_port(), folder / "router.log"
    name, *arguments = router.command
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(programs / name, *arguments, "--host", "127.0.0.1", "--port", str(port)),
                *("--policy", "round_robin", "--prometheus-port", str(free_port())),
                *("--disable-retries", "--worker-urls", *urls),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        )
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


async def asked(session: aiohttp.ClientSession, url: str) -> int:
    """The status of an answer; 0: there was none."""
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with session.post(f"{url}/v1/chat/completions", json=CHAT) as reply:
            await reply.read()
            return reply.status
    return 0


async def served(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        text = await reply.text()
    name = 'vllm:request_success_total{engine="0",finished_reason="length"'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_a_router_sends_nothing_to_a_replica_that_compiles(
    program: tuple[Router, Path], replicas: tuple[Server, str], tmp_path: Path
) -> None:
    first, second = replicas[0].url, replicas[1]
    asked_at: list[tuple[float, int]] = []
    async with (
        running(program, tmp_path, first, second) as (url, log),
        aiohttp.ClientSession() as session,
    ):
        end = time.monotonic() + 240
        while await served(second) < 1:
            assert time.monotonic() < end, log.read_text()[-4000:]
            asked_at.append((time.monotonic(), await asked(session, url)))
            await asyncio.sleep(0.2)
        # Some answer nothing, or that they have no worker, until a replica has been found.
        begun = next(at for at, status in asked_at if status == 200) + program[0].notices
        assert {status for at, status in asked_at if at >= begun} == {200}, asked_at
        await check_use(session, url, first, second)


async def check_use(session: aiohttp.ClientSession, url: str, first: str, second: str) -> None:
    """Chat, stream, cancel, and the model's name, through a router with both replicas."""
    before = await served(first), await served(second)
    assert [await asked(session, url) for _ in range(10)] == [200] * 10
    assert await served(first) > before[0] and await served(second) > before[1]
    async with session.get(f"{url}/v1/models") as reply:
        names = [model["id"] for model in (await reply.json(content_type=None))["data"]]
        assert names == [MODEL]
    streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/chat/completions", json=streamed) as reply:
        text = await reply.text()
    assert text.rstrip().endswith("data: [DONE]") and '"cached_tokens"' in text
    long = {**streamed, "max_tokens": 2000, "ignore_eos": True}
    async with session.post(f"{url}/v1/chat/completions", json=long) as reply:
        await reply.content.readany()
    end = time.monotonic() + 20
    while await running_requests(session, first) + await running_requests(session, second):
        assert time.monotonic() < end, "a request whose client has gone goes on"
        await asyncio.sleep(0.2)


async def running_requests(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/load") as reply:
        return (await reply.json())["running"]
