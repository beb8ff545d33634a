"""A lane: a thread that copies in one direction, with a few chunks in flight."""

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
"""Seconds between two attempts to learn whether copies have ended, after the link failed to say
so."""

_LOOK = 0.0002
"""Seconds between two polls of whether a job may begin."""

_SILENT = "the device does not say whether earlier copies have ended"

STORE_DEPTH = 4
"""Chunks of stores in flight at once. The results of a step queue behind all of them, and the
engine waits for those."""

_LOAD_DEPTHS, _LOAD_BYTES = (4, 8), 40 << 20
"""The least and the most chunks of loads in flight at once, and their target in bytes. The inputs
of the next step queue behind them while the current step runs. The chunks must last while the
engine thread holds the interpreter lock; this many bytes last 0.8 ms."""


def load_depth(chunk_bytes: int) -> int:
    """Returns how many chunks of loads are in flight at once."""
    least, most = _LOAD_DEPTHS
    return max(least, min(_LOAD_BYTES // chunk_bytes, most))


class Chunk(NamedTuple):
    """Bytes to copy, given by addresses."""

    target: int
    source: int
    nbytes: int


class Link(Protocol):
    """Copies chunks in one direction, in order. All methods but `close` belong to the lane's
    thread. All may raise CudaError."""

    def enter(self) -> None:
        """Called once, before all other methods."""
        ...

    def begin(self, chunk: Chunk, event: int) -> None:
        """Begins a copy. `event`, 0 to the lane's depth - 1, later identifies its end.

        If this fails, the copy may or may not have begun.
        """
        ...

    def wait(self, event: int) -> None:
        """Waits until the copy that was begun with `event` has ended."""
        ...

    def drain(self) -> None:
        """Waits until all copies have ended."""
        ...

    def close(self) -> None:
        """Called when the lane has ended."""
        ...


@dataclass
class _Copy[Job]:
    """A job that has begun."""

    job: Job
    begin: float = field(default_factory=time.perf_counter)
    error: str | None = None
    flying: int = 0
    """Number of chunks in flight."""
    all_begun: bool = False


class Lane[Job]:
    """Runs jobs one after another. Each job is a number of chunks. The next job begins while the
    last chunks of the previous one are in flight.

    Any failure becomes the error of a job. A failed job ends when none of its chunks is in flight.
    While the link cannot say so, the job does not end, because its memory may still be written, and
    no other job begins.
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
          name: name of the thread.
          chunks: returns the chunks of a job.
          ready: returns at once whether a job may begin. Its exception becomes the job's error.
          ended: called on the lane's thread or that of `submit` with the job, its error or None,
            and its duration in seconds.
          depth: chunks in flight at once.
        """
        self._link, self._chunks, self._ended, self._depth = link, chunks, ended, depth
        self._ready = ready
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._unusable: str | None = None
        self._flying: deque[tuple[_Copy[Job], int]] = deque()
        self._unsure = False
        """Whether chunks may be in flight that no event reports."""
        self._withheld: list[_Copy[Job]] = []
        """Failed copies that may still be in flight."""
        self._warned = False
        self._next_event = 0
        # A daemon thread: a device that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job. Returns at once."""
        if self._closed:
            self._ended(job, "the copier is closed", 0.0)
        else:
            self._jobs.put(job)

    def close(self) -> None:
        """Stops the lane: jobs that have not begun fail. Returns at once. `submit` must not run on
        another thread meanwhile."""
        self._closed = True
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Waits after `close`, at most `timeout` seconds. Returns whether the thread has ended with
        nothing in flight."""
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
        """Waits until a job may begin, and finishes earlier jobs meanwhile. Returns an error if the
        job can never begin."""
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
        """Waits for the oldest chunk in flight."""
        copy, event = self._flying.popleft()
        try:
            self._link.wait(event)
        except CudaError as error:
            self._fail(copy, error)
        copy.flying -= 1
        self._settle(copy)

    def _fail(self, copy: _Copy[Job], error: CudaError) -> None:
        """Handles a failed call. The chunks that it began may have no event that reports their end."""
        copy.error = copy.error or str(error)
        if not self._unsure:
            self._unsure = True
            self._drain()

    def _drain(self) -> None:
        """Waits until nothing is in flight, if the link can tell. Then ends the withheld copies."""
        try:
            self._link.drain()
        except CudaError as error:
            if not self._warned:
                self._warned = True
                log.error("no pages are copied until the device answers: %s", error)
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
