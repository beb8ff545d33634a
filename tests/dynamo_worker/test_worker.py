"""Two workers behind Dynamo's own frontend, without etcd, NATS or a GPU."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
SHAPES = ("--decode-buckets", "8", "--prefill-buckets", "128", "--max-model-len", "1024")
ASKED = {"model": "jaxserve-embedded", "prompt": "The capital of", "temperature": 0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None,
        reason="Dynamo's packages are not installed: see docs/dynamo.md",
    ),
]


class Dynamo:
    """A frontend and two workers."""

    def __init__(self, folder: Path, *, by_events: bool = False):
        """`by_events`: the frontend routes by what the workers' caches hold."""
        self.folder = folder
        (folder / "discovery").mkdir()
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port: int = listening.getsockname()[1]
        routing = ("--router-mode", "kv", "--kv-cache-block-size", "16") if by_events else ()
        self.url = f"http://127.0.0.1:{port}"
        frontend = ("--http-port", str(port), "--migration-limit", "3", *routing)
        self.processes = {"frontend": self.start("frontend", "dynamo.frontend", *frontend)}
        for name in ("one", "two"):
            events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/{name}.events"}
            publish = ("--kv-events-config", json.dumps(events)) if by_events else ()
            flags = ("--cache-dir", str(folder / "cache"), *SHAPES, *publish)
            self.processes[name] = self.start(name, "jaxserve.dynamo", *flags)
            self.wait_for(name)

    def start(self, name: str, module: str, *flags: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
        settings = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        settings["DYN_FILE_KV"] = str(self.folder / "discovery")
        for ours in ("JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS"):  # of the tests, not of a user
            settings.pop(ours, None)
        with (self.folder / name).open("wb") as log:
            command = [sys.executable, "-m", module, *PLANES, *flags]
            return subprocess.Popen(command, env=settings, stdout=log, stderr=subprocess.STDOUT)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 240
        while "Registered endpoint" not in self.log(name):
            assert self.processes[name].poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.2)

    def log(self, name: str) -> str:
        """Returns what a process has written, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / name).read_text())

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    async def stream(self, max_tokens: int, begun: asyncio.Semaphore | None = None) -> str:
        """Returns the text of a stream that ends in order."""
        text, finish = "", None
        async for event in self.events(max_tokens):
            assert event["choices"], event
            text += event["choices"][0]["text"]
            finish = event["choices"][0].get("finish_reason")
            if begun is not None and len(text) > 20:
                begun.release()
                begun = None
        assert finish == "length"
        return text

    async def events(self, max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        body = {**ASKED, "max_tokens": max_tokens, "stream": True}
        body["ignore_eos"] = True
        url = f"{self.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                data = line.decode().strip().removeprefix("data: ")
                if data.startswith("{"):
                    yield json.loads(data)

    async def ask(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            url = f"{self.url}/v1/completions"
            async with session.post(url, json={**ASKED, **fields}) as reply:
                return reply.status, await reply.json()


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    running = Dynamo(tmp_path_factory.mktemp("dynamo"))
    yield running
    running.kill()


async def until_known(dynamo: Dynamo) -> None:
    """The frontend hears of workers a moment after they are ready."""
    async with asyncio.timeout(60):
        while (await dynamo.ask(max_tokens=1))[0] == 404:
            await asyncio.sleep(0.2)


async def test_it_answers_and_refuses_by_name(dynamo: Dynamo) -> None:
    await until_known(dynamo)
    status, body = await dynamo.ask(max_tokens=4)
    assert status == 200 and body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"
    status, body = await dynamo.ask(max_tokens=4, n=2, temperature=1)
    assert (status, body["message"]) == (400, "n is 1 at most: send several requests")


async def test_a_client_that_leaves_ends_its_sequence(dynamo: Dynamo) -> None:
    """Eight rows are all that a worker has: further requests would wait for those that left."""
    for _ in range(20):
        events = dynamo.events(900)
        await anext(events)
        await events.aclose()
    async with asyncio.timeout(30):
        assert (await dynamo.ask(max_tokens=4))[0] == 200


async def test_a_stream_goes_on_at_another_worker_when_its_own_is_killed(dynamo: Dynamo) -> None:
    whole = await dynamo.stream(150)
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(dynamo.stream(150, begun)) for _ in range(2)]
    await begun.acquire()
    await begun.acquire()
    dynamo.processes["one"].kill()
    assert await asyncio.gather(*streams) == [whole, whole]
    assert re.search(
        r"migration retry scheduled .*migration.tokens_completed=[1-9]", dynamo.log("frontend")
    )


async def test_a_worker_that_is_told_to_end_finishes_its_streams(dynamo: Dynamo) -> None:
    whole = await dynamo.stream(60)
    begun = asyncio.Semaphore(0)
    stream = asyncio.create_task(dynamo.stream(60, begun))
    await begun.acquire()
    dynamo.processes["two"].send_signal(signal.SIGTERM)
    assert await stream == whole
    assert await asyncio.to_thread(dynamo.processes["two"].wait, 60) == 0


async def test_requests_find_the_worker_that_has_their_beginning() -> None:
    draw = random.Random(4)

    def text(words: int) -> str:
        return " ".join(
            draw.choices(["the", "of", "and", "to", "you", "that", "it", "was"], k=words)
        )

    with tempfile.TemporaryDirectory(prefix="d") as folder:  # sockets have room for its path
        dynamo = Dynamo(Path(folder), by_events=True)
        try:
            await until_known(dynamo)
            beginnings, cached = [text(120) for _ in range(6)], list[int]()
            for _ in range(5):
                for begins in draw.sample(beginnings, 6):
                    status, body = await dynamo.ask(prompt=f"{begins} {text(4)}", max_tokens=2)
                    assert status == 200
                    details = body["usage"]["prompt_tokens_details"] or {}
                    cached.append(details.get("cached_tokens") or 0)
                await asyncio.sleep(0.5)  # events take a moment
            workers = set(re.findall(r"worker_id=(\d+)", dynamo.log("frontend")))
        finally:
            dynamo.kill()
    assert all(tokens > 100 for tokens in cached[6:]), cached
    assert len(workers) == 2
