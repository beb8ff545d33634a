"""A real `python -m jaxserve` process for tests."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]

FEW_BUCKETS = ("--decode-buckets", "8", "--prefill-buckets", "128")
"""Two steps in place of seven: a start compiles or loads them, runs them, and times them."""


def start(*flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run the server on a free port of loopback, on the CPU."""
    return run("-m", "jaxserve", "--port", "0", *flags, environment=environment)


def run(
    *arguments: str,
    environment: dict[str, str] | None = None,
    before: str = "",
) -> subprocess.Popen[str]:
    """A Python process that knows our packages, on the CPU.

    Args:
      before: Python that the process runs first, to take something from itself. It becomes
        another Python then: a function of ours after a fork could wait for ever for jax's threads.
    """
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    settings = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    for ours in ("JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS"):  # of the tests, not of a user
        settings.pop(ours, None)
    settings |= environment or {}
    become = f"{before}; import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, *(("-S", "-c", become) if before else ())]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files_of_at_most(size: int) -> str:
    """For `run`: a write beyond it fails half-way, as on a full disk."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


OBEY_PERMISSIONS = "import ctypes; [ctypes.CDLL(None).prctl(24, n, 0, 0, 0) for n in (1, 2)]"
"""For `run`: files' modes count for root, too, without the capabilities to ignore them, which are
CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH. 24 is PR_CAPBSET_DROP, which takes effect at exec."""


def small_model(folder: Path) -> Path:
    """Fill the folder with a checkpoint that takes seconds to compile and no time to run."""
    shutil.copytree(ROOT / "tests" / "golden" / "tied", folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "checkpoints/jaxserve_checkpoints/embedded" / name, folder / name)
    return folder


SMALL_SHAPES = (
    *("--decode-buckets", "1", "--prefill-buckets", "16", "--max-model-len", "64"),
    *("--kv-cache-memory-bytes", "1M"),
)
"""Two steps for `small_model`."""


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read the output up to a line that matches."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"ended ({process.wait()}) without {pattern!r}:\n{''.join(seen)}")


def finish(process: subprocess.Popen[str], *, timeout: float = 30.0) -> tuple[int, str]:
    """Exit status and the rest of the output; kills what does not end in time."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
    return process.returncode, output


class Server:
    """A server that is ready, until the context ends. It has few buckets, unless flags say more."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None):
        self._flags, self._environment = flags, environment

    def __enter__(self) -> Server:
        self.process = start(
            "--forbid-compiles", *FEW_BUCKETS, *self._flags, environment=self._environment
        )
        try:
            self.url = read_until(self.process, r"is ready: \S+ at (http\S+)/v1")[1]
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    async def metric(self, name: str) -> float:
        """The value of a sample, `name` with its labels as in the exposition or without any."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == name or sample.partition("{")[0] == name:
                return float(value)
        raise AssertionError(f"no metric {name}")

    async def samples(self, name: str) -> dict[str, float]:
        """The values of a name's samples, by their labels as in the exposition."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            lines = [line.rpartition(" ") for line in (await reply.text()).splitlines()]
        return {key: float(n) for key, _, n in lines if key.partition("{")[0] == name}

    async def get(self, path: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as reply:
            return await reply.json()

    async def load(self) -> dict[str, int]:
        return await self.get("/load")

    async def settled(self) -> dict[str, int]:
        """/load once nothing runs or waits any more."""
        deadline = time.monotonic() + 20
        while (now := await self.load())["running"] or now["waiting"]:
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.05)
        return now
