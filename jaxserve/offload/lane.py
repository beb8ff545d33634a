"""A thread that copies in one direction, a few chunks at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jaxserve_kernels.cuda_driver import CudaError

log = logging.getLogger(__name__)

_AGAIN = 0.05
"""Seconds after which a link that could not say so is asked again whether its copies have ended."""

_LOOK = 0.0002
"""Seconds between two looks at whether a job may begin."""

_SILENT = "the device does not say whether earlier copies have ended"

STORE_DEPTH = 4
"""Chunks of stores on their way at once: steps' results, which somebody waits for, queue behind all
of them."""

_LOAD_DEPTHS, _LOAD_BYTES = (4, 8), 40 << 20
"""Of loads at least and at most, and about so many bytes. The inputs of a step queue behind them,
while the one before it runs. They have to last while the engine's thread keeps the interpreter: so
many bytes last 0.8 ms."""


def load_depth(chunk_bytes: int) -> int:
    """Returns how many chunks of loads are on their way at once."""
    least, most = _LOAD_DEPTHS
    return max(least, min(_LOAD_BYTES // chunk_bytes, most))


class Chunk(NamedTuple):
    """Bytes to copy, by addresses."""

    target: int
    source: int
    nbytes: int


class Link(Protocol):
    """What copies chunks in one direction, in the order in which they are begun. But for `close`
    its methods belong to the lane's thread; all may raise CudaError."""

    def enter(self) -> None:
        """Called once, before all others."""
        ...

    def begin(self, chunk: Chunk, event: int) -> None:
        """Begin a copy, of which `event`, 0 to the lane's depth - 1, then tells the end.

        If it fails, the copy may have begun or not.
        """
        ...

    def wait(self, event: int) -> None:
        """Return when the copy that was begun with `event` has ended."""
        ...

    def drain(self) -> None:
        """Return when all copies have ended."""
        ...

    def close(self) -> None:
        """Called when the lane has ended."""
        ...


@dataclass
class _Copy[Job]:
    """A job that was begun."""

    job: Job
    begin: float = field(default_factory=time.perf_counter)
    error: str | None = None
    flying: int = 0
    """Chunks on their way."""
    all_begun: bool = False


class Lane[Job]:
    """Runs jobs one after another, each a number of chunks; the next begins while the last chunks
    of the one before are on their way.

    Whatever fails becomes the error of a job. A job with an error ends when none of its chunks is
    on its way any more. While the link cannot say so, the job does not end, because its memory may
    still be written, and no other begins.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        chunks: Callable[[Job], Sequence[Chunk]],
        ended: Callable[[Job, str | None, float], None],
        *,
        depth: int,
        ready: Callable[[Job], bool],
    ):
        """
        Args:
          name: of the thread.
          chunks: what a job copies.
          ready: whether a job may begin, without waiting. What it raises becomes the job's error.
          ended: called in the lane's thread, or in that of `submit`, with the job, what went wrong
            and the seconds that it took.
          depth: chunks that are on their way at once.
        """
        self._link, self._chunks, self._ended, self._depth = link, chunks, ended, depth
        self._ready = ready
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._unusable: str | None = None
        self._flying: deque[tuple[_Copy[Job], int]] = deque()
        self._unsure = False
        """Chunks that no event tells of may be on their way."""
        self._withheld: list[_Copy[Job]] = []
        """Copies that failed and may still be on their way."""
        self._warned = False
        self._next_event = 0
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job after those submitted before. Does not wait."""
        if self._closed:
            self._ended(job, "the copier is closed", 0.0)
        else:
            self._jobs.put(job)

    def close(self) -> None:
        """Begin nothing any more: jobs that have not begun fail. Does not wait. `submit` must not
        be running in another thread."""
        self._closed = True
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Wait after `close`, `timeout` seconds at most. Returns whether the thread has ended, and
        nothing is on its way."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive() and not self._unsure

    def _run(self) -> None:
        try:
            self._link.enter()
        except CudaError as error:
            self._unusable = str(error)
        while True:
            try:
                job = self._jobs.get(
                    block=not self._flying, timeout=_AGAIN if self._unsure else None
                )
            except queue.Empty:
                self._retire() if self._flying else self._drain()
                continue
            if job is None:
                break
            self._begin(job)
        while self._flying:
            self._retire()
        if self._unsure:
            self._drain()

    def _await(self, job: Job) -> str | None:
        """Wait until a job may begin, and see to the jobs before it meanwhile. Returns why it never
        may."""
        try:
            while not self._closed and not self._ready(job):
                self._retire() if self._flying else time.sleep(_LOOK)
        except Exception as error:
            return str(error) or repr(error)
        return None

    def _begin(self, job: Job) -> None:
        refusal = self._await(job) or self._unusable
        if self._closed:
            refusal = "the copier is closed"
        if refusal is None and self._unsure:
            refusal = _SILENT
        if refusal is not None:
            self._ended(job, refusal, 0.0)
            return
        copy = _Copy(job)
        try:
            for chunk in self._chunks(job):
                while len(self._flying) >= self._depth:
                    self._retire()
                if self._unsure:
                    raise CudaError(_SILENT)
                self._link.begin(chunk, self._next_event)
                copy.flying += 1
                self._flying.append((copy, self._next_event))
                self._next_event = (self._next_event + 1) % self._depth
        except CudaError as error:
            self._fail(copy, error)
        copy.all_begun = True
        self._settle(copy)

    def _retire(self) -> None:
        """Wait for the chunk that was begun first."""
        copy, event = self._flying.popleft()
        try:
            self._link.wait(event)
        except CudaError as error:
            self._fail(copy, error)
        copy.flying -= 1
        self._settle(copy)

    def _fail(self, copy: _Copy[Job], error: CudaError) -> None:
        """A call failed, so what was begun may have no event that tells its end."""
        copy.error = copy.error or str(error)
        if not self._unsure:
            self._unsure = True
            self._drain()

    def _drain(self) -> None:
        """Wait until nothing is on its way, if the link can tell. Ends the copies that waited for
        this."""
        try:
            self._link.drain()
        except CudaError as error:
            if not self._warned:
                self._warned = True
                log.error("pages are not copied until the device answers: %s", error)
            return
        self._unsure = False
        withheld, self._withheld = self._withheld, []
        for copy in withheld:
            self._settle(copy)

    def _settle(self, copy: _Copy[Job]) -> None:
        if not copy.all_begun or copy.flying:
            return
        if copy.error is not None and self._unsure:
            self._withheld.append(copy)
        else:
            self._ended(copy.job, copy.error, time.perf_counter() - copy.begin)
