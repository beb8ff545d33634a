"""A fleet on Ray Serve, as a user starts it: `python -m jaxserve.ray` on the CPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

ROOT = Path(__file__).parents[2]
HEADER = "x-jaxserve-replica"


class Streamed(NamedTuple):
    """What a client got of a stream of completions."""

    replica: str
    text: str
    events: int
    """With tokens; their text may be empty."""
    done: bool
    """It ended with [DONE], and its connection in order."""
    error: str | None
    """The code of its error event."""
    cached: int
    """Of the prompt's tokens; -1: it ended without usage."""


class Fleet:
    """A running fleet, until the context ends. Ray keeps its files and sockets in `folder`, whose
    path must be short; programs and weights are kept in `cache`."""

    def __init__(self, folder: Path, cache: Path, *flags: str, replicas: int = 2):
        self._folder, self._cache, self._flags = folder, cache, flags
        self._replicas = replicas
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
        settings = {**os.environ, "PYTHONPATH": path, "HOME": str(self._folder)}
        settings |= {"RAY_TMPDIR": str(self._folder), "RAY_USAGE_STATS_ENABLED": "0"}
        for ours in ("JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS"):  # of the tests, not of a user
            settings.pop(ours, None)
        self._log = (self._folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxserve.ray", "--replicas", str(self._replicas)),
                *("--gpus", "0", "--cpus", "0.5", "--port", str(self.port)),
                *("--cache-dir", str(self._cache), *self._flags),
            ],
            cwd=ROOT,
            env=settings,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 420
            while f"is ready: {self._replicas} replicas at" not in self.log():
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End it in order; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(90)
        finally:
            self.process.kill()
            self._log.close()

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def servers(self) -> dict[int, int]:
        """Processes of servers, and of the replicas whose children they are."""
        found: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                settings = (folder / "environ").read_bytes().split(b"\0")
                parent = re.search(r"^PPid:\s+(\d+)$", (folder / "status").read_text(), re.M)
            except OSError:
                continue
            if b"--uds" in words and f"HOME={self._folder}".encode() in settings and parent:
                found[int(folder.name)] = int(parent[1])
        return found

    async def replicas(self) -> set[str]:
        """Names of the replicas that answer."""
        pattern = r'^vllm:num_requests_running\{replica="(\w+)"'
        return set(re.findall(pattern, await self._metrics(), re.M))

    async def running(self) -> float:
        """Sequences that are running or waiting, of all replicas."""
        pattern = r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$"
        return sum(map(float, re.findall(pattern, await self._metrics(), re.M)))

    async def _metrics(self) -> str:
        url = f"{self.url}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.text()

    async def two(self, without: str = "") -> set[str]:
        """Waits until two replicas answer, of which none has this name."""
        async with asyncio.timeout(240):
            while True:
                names = await self.replicas()
                if len(names) == 2 and without not in names:
                    return names
                await asyncio.sleep(0.5)


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    max_tokens: int,
    begun: asyncio.Semaphore | None = None,
) -> Streamed:
    """Returns what comes of a completion. `begun` is released at the first token. An answer other
    than 200 fails, as does a connection that breaks."""
    body = {"model": "jaxserve-embedded", "prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text, events, done, error, cached = "", 0, False, None, -1
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data.startswith(":"):
                continue
            assert not done
            if data == "[DONE]":
                done = True
                continue
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                error = event["error"]["code"]
            elif event["choices"]:
                events += 1
                if begun is not None and events == 1:
                    begun.release()
                text += event["choices"][0]["text"]
            else:
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Streamed(reply.headers[HEADER], text, events, done, error, cached)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
