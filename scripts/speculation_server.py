"""Starts, switches and stops the server of `bench_speculation.py`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ARMS = {"off": signal.SIGUSR1, "on": signal.SIGUSR2}
"""Arms, and the signals that switch the server to them."""


class Server:
    """A running server whose drafts can be switched on and off."""

    def __init__(self, process: subprocess.Popen[str], log: Any):
        self._process, self._log = process, log
        self.url = ""

    def wait_ready(self, deadline: float) -> None:
        """Waits until the server is ready. Raises RuntimeError if it is not ready in time."""
        while time.monotonic() < deadline and self._process.poll() is None:
            text = self._text()
            if found := re.search(r"is ready: \S+ at (http\S+)/v1", text):
                self.url, times = found[1], re.search(r"step times, .*", text)
                print(times[0] if times else "ready", flush=True)
                return
            time.sleep(0.25)
        raise RuntimeError(f"the server did not become ready:\n{self._text()[-4000:]}")

    async def switch(self, arm: str) -> None:
        """Begins a turn, off or on, and waits until the server confirms."""
        told = self._text().count("drafts are to be ")
        self._process.send_signal(ARMS[arm])
        for _ in range(500):
            if self._text().count("drafts are to be ") > told:
                return
            await asyncio.sleep(0.01)
        raise RuntimeError(f"the server does not switch:\n{self._text()[-4000:]}")

    def turns(self) -> list[dict[str, Any]]:
        """All turns that have ended: see `switched_server.py`."""
        return [json.loads(found) for found in re.findall(r"^turn (.*)$", self._text(), re.M)]

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read()


@contextlib.contextmanager
def served(
    model: str, flags: list[str], step_times: Path, args: argparse.Namespace
) -> Generator[Server]:
    """Context manager: starts a server, and yields it when it is ready and has written its step
    times. Stops it at the end."""
    command = [sys.executable, str(ROOT / "scripts" / "switched_server.py"), "--model", model]
    command += ["--port", "0", "--gpu-memory-utilization", str(args.memory), *flags]
    command += ["--speculative-config", '{"method": "ngram"}', "--served-model-name", "served"]
    with tempfile.NamedTemporaryFile("w") as written, open(written.name) as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), "STEP_TIMES": str(step_times)},
            stdout=written,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            server = Server(process, log)
            server.wait_ready(time.monotonic() + args.start_timeout)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def environment() -> dict[str, str]:
    """The environment of child processes that run this source tree."""
    paths = [str(ROOT / part) for part in ("", "kernels", "checkpoints", "scripts")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
