"""A server as a child process, reached over a Unix socket. Does not depend on Ray."""

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
"""A Python script that runs another one, which the kernel kills when its parent dies. So the GPU is
free for the next replica, however this one ended. The parent may have died before the prctl
call."""


class ChildFailed(Exception):
    """The server ended by itself. The message has its last lines."""


class Queue(msgspec.Struct):
    """Numbers of requests in a server."""

    running: int
    waiting: int


class Child:
    """A server process and the connections to it. All methods belong to one event loop. Its thread
    must live as long as the process, because the kernel treats the thread's end as the parent's."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] | None = None):
        """`flags`: flags of serving. `environment`: variables added to those of this process."""
        self._flags = flags
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop(ADMIN_API_KEY, None)
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._said = b""
        self._copying: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str] = ("-m", "jaxserve")) -> None:
        """Starts the server and waits until it is ready. `command`: arguments of Python.

        Raises:
          ChildFailed: the server ended instead.
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
        """Waits until the server has ended. Returns how it ended."""
        assert self._process is not None
        await self._process.wait()
        return await self._failure()

    async def queue(self) -> Queue:
        """Returns the numbers of requests in the server.

        Raises:
          ReplicaLost: the server does not answer.
        """
        _, body = await self._get("/health")
        return msgspec.json.decode(body, type=Queue)

    async def check(self) -> None:
        """Makes the server generate a token.

        Raises:
          ReplicaLost: the server cannot, or does not answer.
        """
        status, body = await self._get("/health?deep=1")
        if status != 200:
            raise ReplicaLost(f"/health answers {status}: {body[:200].decode(errors='replace')}")

    async def exchange(self, call: Call) -> AsyncGenerator[Head | bytes]:
        """Yields the answer's head and then its bytes as they arrive. Closing the generator closes
        the connection, and the server aborts the request.

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
        """Ends the server with SIGTERM, and with SIGKILL after `patience` seconds. Blocks. Any
        thread may call it at any time, more than once."""
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
        """Closes the connections."""
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
        if self._copying is not None:  # subprocesses may keep the server's standard error open
            await asyncio.wait((self._copying,), timeout=1)
        code = None if self._process is None else self._process.returncode
        said = self._said.decode(errors="replace").splitlines()[-_LAST_LINES:]
        return ChildFailed("\n".join([f"the server ended with status {code}", *said]))

    async def _copy_errors(self) -> None:
        """Copies the server's standard error to this process's, and keeps the last lines."""
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(_LAST_BYTES):
            self._said = (self._said + data)[-_LAST_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))


def _is_kept(name: str) -> bool:
    return name.lower() not in NOT_ANSWERED


def _runs(pid: int) -> bool:
    """Returns whether a child runs. A child that has ended may still be a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
