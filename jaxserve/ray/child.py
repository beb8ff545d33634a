"""A server as a child of this process, reached by a Unix socket. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec
from yarl import URL

from jaxserve.ray.call import NOT_ANSWERED, NOT_ASKED, Call, Head, ReplicaLost
from jaxserve.startup.environment import ADMIN_API_KEY

_LOOK_SECONDS = 0.1
_LAST_LINES, _LAST_BYTES = 20, 16_384
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Python that becomes another one which the kernel kills when its parent is gone: a GPU is free
for the next replica however this one ended. The parent may have died before it was said so."""


class ChildFailed(Exception):
    """The server ended by itself; the message has its last lines."""


class Queue(msgspec.Struct):
    """Requests of a server."""

    running: int
    waiting: int


class Child:
    """A server process and the connections to it. All methods belong to one event loop, whose
    thread must live as long as the process: the kernel takes its end for the parent's."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] | None = None):
        """`flags`: of serving. `environment`: settings added to this process's."""
        self._flags = flags
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop(ADMIN_API_KEY, None)
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._said = b""
        self._copying: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str] = ("-m", "jaxserve")) -> None:
        """Start the server and wait until it is ready. `command`: what Python runs.

        Raises:
          ChildFailed: it ended instead.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="jaxserve-"))
        socket = self._folder / "socket"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())),
            *(*command, *self._flags, "--uds", str(socket)),
            env=self._environment,
            stderr=asyncio.subprocess.PIPE,
        )
        self._copying = asyncio.create_task(self._copy_errors())
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        while not await self._is_ready():
            if self._process.returncode is not None:
                failure = await self._failure()
                self.stop(0)
                await self.close()
                raise failure
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> ChildFailed:
        """Waits until the server has ended; returns how."""
        assert self._process is not None
        await self._process.wait()
        return await self._failure()

    async def queue(self) -> Queue:
        """Returns how many requests the server has.

        Raises:
          ReplicaLost: it does not answer.
        """
        _, body = await self._get("/health")
        return msgspec.json.decode(body, type=Queue)

    async def check(self) -> None:
        """Has the server make a token.

        Raises:
          ReplicaLost: it cannot, or does not answer.
        """
        status, body = await self._get("/health?deep=1")
        if status != 200:
            raise ReplicaLost(f"/health answers {status}: {body[:200].decode(errors='replace')}")

    async def exchange(self, call: Call) -> AsyncGenerator[Head | bytes]:
        """Yields the answer's head, then its bytes as they come. Closing the generator closes the
        connection, and the server stops to compute.

        Raises:
          ReplicaLost: the server is gone.
        """
        assert self._session is not None
        headers = [(name, value) for name, value in call.headers if name.lower() not in NOT_ASKED]
        url = URL(f"http://jaxserve{call.path}", encoded=True)
        asking = self._session.request(
            *(call.method, url),
            headers=headers,
            data=call.body or None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        try:
            async with asking as reply:
                answered = (
                    (n.decode("latin-1"), v.decode("latin-1")) for n, v in reply.raw_headers
                )
                kept = ((name, value) for name, value in answered if _is_kept(name))
                yield Head(reply.status, tuple(kept))
                while data := await reply.content.readany():
                    yield data
        except aiohttp.ClientError as error:
            raise ReplicaLost(f"the server is gone: {type(error).__name__}") from error

    def stop(self, patience: float) -> None:
        """End the server: politely, then after `patience` seconds surely. Blocks; may be called at
        any time, from any thread, more than once."""
        process, folder = self._process, self._folder
        if process is not None and process.returncode is None:
            deadline = time.monotonic() + patience
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                while _runs(process.pid) and time.monotonic() < deadline:
                    time.sleep(0.02)
                if _runs(process.pid):
                    os.kill(process.pid, signal.SIGKILL)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Close the connections."""
        if self._copying is not None:
            self._copying.cancel()
        if self._session is not None:
            await self._session.close()

    async def _is_ready(self) -> bool:
        try:
            return (await self._get("/ready"))[0] == 200
        except ReplicaLost:
            return False

    async def _get(self, path: str) -> tuple[int, bytes]:
        status, parts = 0, list[bytes]()
        async with contextlib.aclosing(self.exchange(Call("GET", path, (), b""))) as items:
            async for item in items:
                if isinstance(item, Head):
                    status = item.status
                else:
                    parts.append(item)
        return status, b"".join(parts)

    async def _failure(self) -> ChildFailed:
        if self._copying is not None:  # processes of the server may hold its standard error
            await asyncio.wait((self._copying,), timeout=1)
        code = None if self._process is None else self._process.returncode
        said = self._said.decode(errors="replace").splitlines()[-_LAST_LINES:]
        return ChildFailed("\n".join([f"the server ended with status {code}", *said]))

    async def _copy_errors(self) -> None:
        """What the server writes goes to this process's errors; its last lines are kept."""
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(_LAST_BYTES):
            self._said = (self._said + data)[-_LAST_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))


def _is_kept(name: str) -> bool:
    return name.lower() not in NOT_ANSWERED


def _runs(pid: int) -> bool:
    """Says whether a child runs; one that has ended may still wait to be asked for its status."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
