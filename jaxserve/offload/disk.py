"""The disk tier: pages in files, below host memory, in a folder with a size limit. The files
survive a restart."""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxserve.offload.copier import Completion
from jaxserve.offload.counters import OffloadCounters
from jaxserve.offload.page_files import HASH_BYTES, HEADER_BYTES, DamagedFile, PageFiles
from jaxserve.offload.page_folder import FolderError, PageFolder, remove
from jaxserve.offload.page_index import PageIndex
from jaxserve.offload.slab import HostSlab

log = logging.getLogger(__name__)

THREADS = 4
TIMEOUT = 10.0
"""Seconds after which a read or write of a page is given up. A read takes milliseconds."""

MAX_WRITES = 64
"""The most pages that wait to be written; each occupies a slot of host memory."""

_CLOSING_SECONDS = 10.0


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FILLING = enum.auto()
    """Its slot of host memory is being written, so the job cannot be given up."""
    ENDED = enum.auto()


@dataclass(eq=False, kw_only=True)
class _Job:
    key: bytes
    host_slot: int
    tag: int
    is_put: bool
    deadline: float
    """Deadline by `time.monotonic`."""
    state: _State = _State.WAITING


class _News(NamedTuple):
    """Results that `poll` reports and counts."""

    completion: Completion | None
    changes: dict[str, float]
    """Increments of counters, by name."""


class DiskTier:
    """Writes pages from slots of host memory to files, and reads them back.

    `put`, `get`, `poll` and `close` belong to one thread. Only `close` waits for the disk. `poll`
    returns each tag once, in any order. A job has ended when nothing reads or writes its slot any
    more, also if it failed.

    A page that cannot be read is a miss and is removed. A thread scans the folder at start, and a
    page is found once the scan has seen it. Until the scan ends, the folder may exceed its limit.

    Attributes:
      counters: updated by `poll`.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        slab: HostSlab,
        fingerprint: str,
        *,
        wake: Callable[[], None],
        threads: int = THREADS,
        timeout: float = TIMEOUT,
        counters: OffloadCounters | None = None,
    ):
        """
        Args:
          folder: other processes may use it too; each keeps its pages in its own directory.
          max_bytes: limit for the files of this process and files that no process owns.
          slab: the host memory.
          fingerprint: names everything that the meaning of a page's bytes depends on, besides its
            hash.
          wake: called on another thread when `poll` has results.
          threads: number of threads that read and write.
          timeout: seconds after which a read or write is given up.
          counters: counters to update; None: new ones.

        Raises:
          FolderError: the folder cannot be used, or is too small for one page.
        """
        file_bytes = HEADER_BYTES + slab.stride
        if max_bytes < file_bytes:
            raise FolderError(f"{max_bytes} bytes on disk do not hold a page of {file_bytes}")
        self.counters = counters or OffloadCounters()
        self._slab, self._wake, self._timeout = slab, wake, timeout
        self._folder = PageFolder(folder, fingerprint)
        self._index = PageIndex(self._folder, file_bytes, max_bytes)
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._to_do, self._clock = threading.Condition(self._lock), threading.Condition(self._lock)
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._running: dict[_Job, None] = {}
        """Jobs that may be given up, earliest deadline first."""
        self._news: deque[_News] = deque()
        self._numbers = itertools.count()
        self._closed = False
        self._scanned = threading.Event()
        self._warned: set[str] = set()
        names = ["scan", "clock", *("files" for _ in range(min(threads, max_bytes // file_bytes)))]
        works = {"scan": self._scan, "clock": self._watch, "files": self._work}
        # Daemon threads: a disk that hangs must not keep the process alive.
        self._threads = [
            threading.Thread(target=works[name], name=f"offload-disk-{name}", daemon=True)
            for name in names
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files in the folder. Callable from any thread."""
        return self._index.num_bytes

    def contains(self, key: bytes) -> bool:
        """Returns whether a page is believed to be on disk, by its hash."""
        return key in self._index

    def put(self, key: bytes, host_slot: int, tag: int) -> None:
        """Writes the page in a slot. The slot must not change until the job has ended."""
        assert len(key) == HASH_BYTES
        job = self._job(key, host_slot, tag, is_put=True)
        with self._lock:
            if self._closed:
                refusal, changes = "the disk tier is closed", {}
            elif len(self._writes) >= MAX_WRITES:
                refusal, changes = "too many pages wait to be written", {"disk_busy": 1}
            else:
                self._submit(job, self._writes)
                return
        self._tell(job, refusal, disk_writes_failed=1, **changes)

    def get(self, key: bytes, host_slot: int, tag: int) -> None:
        """Reads a page into a slot and sets the slot's checksum."""
        assert len(key) == HASH_BYTES
        job = self._job(key, host_slot, tag, is_put=False)
        with self._lock:
            if not self._closed and key in self._index:
                self._submit(job, self._reads)
                return
        refusal = "the disk tier is closed" if self._closed else "no such page"
        self._tell(job, refusal, disk_reads_failed=1)

    def poll(self) -> list[Completion]:
        """Returns the jobs that ended since the last call, and updates the counters."""
        completions: list[Completion] = []
        while self._news:
            completion, changes = self._news.popleft()
            for name, change in changes.items():
                setattr(self.counters, name, getattr(self.counters, name) + change)
            if completion is not None:
                completions.append(completion)
        return completions

    def wait_scanned(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until the folder is scanned. Returns whether it is."""
        return self._scanned.wait(timeout)

    def close(self) -> bool:
        """Ends all jobs. Jobs that have not begun fail.

        Returns True if nothing accesses host memory any more. False means that the disk hangs, and
        that the slab must not be freed.
        """
        with self._lock:
            self._closed = True
            waiting = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._to_do.notify_all()
            self._clock.notify_all()
        for job in waiting:
            self._fail(job, "the disk tier is closed")
        deadline = time.monotonic() + _CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._folder.close()
        return True

    def _job(self, key: bytes, host_slot: int, tag: int, *, is_put: bool) -> _Job:
        deadline = time.monotonic() + self._timeout
        return _Job(key=key, host_slot=host_slot, tag=tag, is_put=is_put, deadline=deadline)

    def _submit(self, job: _Job, jobs: deque[_Job]) -> None:
        """Queues a job. Call it with the lock held."""
        if not self._running:
            self._clock.notify()
        self._running[job] = None
        jobs.append(job)
        self._to_do.notify()

    # On the tier's own threads.

    def _scan(self) -> None:
        found, damaged = self._folder.scan(self._file_bytes, lambda: self._closed)
        self._index.fill(found, self._folder.left_over())
        evicted = self._index.make_room()
        self._scanned.set()
        self._count(disk_damaged=damaged, disk_evicted=evicted)

    def _watch(self) -> None:
        """Gives up jobs that have passed their deadline."""
        while True:
            with self._lock:
                if self._closed:
                    return
                job = next(iter(self._running), None)
                left = None if job is None else job.deadline - time.monotonic()
                if job is None or left is None or left > 0:
                    self._clock.wait(left)
                    continue
                if not job.is_put and job.state is _State.RUNNING:
                    self._index.forget(job.key)  # until a later read succeeds
                job.state = _State.ENDED
                del self._running[job]
            self._tell_failure(job, f"it took more than {self._timeout:g} s", disk_timeouts=1)

    def _work(self) -> None:
        files = PageFiles(self._slab.slot_bytes, self._slab.stride, self._folder.fingerprint)
        while (job := self._next()) is not None:
            if job.is_put:
                self._write(files, job)
            else:
                self._read(files, job)

    def _next(self) -> _Job | None:
        """Returns a job to run, reads first; None: the tier is closed."""
        with self._lock:
            while True:
                jobs = self._reads or self._writes
                if jobs:
                    job = jobs.popleft()
                    if job.state is _State.WAITING:
                        job.state = _State.RUNNING
                        return job
                elif self._closed:
                    return None
                else:
                    self._to_do.wait()

    def _write(self, files: PageFiles, job: _Job) -> None:
        begin, written = time.perf_counter(), False
        if not self._index.begin(job.key):
            self._succeed(job)
            return
        temporary = self._folder.temporary(next(self._numbers))
        try:
            self._count(disk_evicted=self._index.make_room())
            written = self._write_file(files, job, temporary)
        except DamagedFile as error:
            self._fail(job, str(error), checksum_failures=1)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._fail(job, f"not written: {error}", disk_full=int(is_full))
        finally:
            self._index.end(job.key, written=written)
        if written:
            seconds = time.perf_counter() - begin
            size = self._slab.slot_bytes
            self._succeed(job, disk_writes=1, disk_write_bytes=size, disk_write_seconds=seconds)

    def _write_file(self, files: PageFiles, job: _Job, temporary: Path) -> bool:
        """Returns whether the page is in place. False if the job was given up meanwhile, because
        its slot may have changed during the write."""
        block, expected = self._slab.block(job.host_slot), self._slab.checksums[job.host_slot]
        try:
            total = files.write(temporary, job.key, block)
        except FileNotFoundError:  # the directory was removed
            self._folder.restore()
            total = files.write(temporary, job.key, block)
        with self._lock:
            is_over = job.state is _State.ENDED
        if is_over or expected not in (None, total):
            remove(temporary)
            if is_over:
                return False
            raise DamagedFile("the page in host memory is damaged")
        temporary.replace(self._folder.path(job.key))
        return True

    def _read(self, files: PageFiles, job: _Job) -> None:
        begin, path = time.perf_counter(), self._folder.path(job.key)
        try:
            total = files.read(path, job.key)
        except (OSError, DamagedFile) as error:
            self._index.forget(job.key)
            removed = remove(path)
            is_damaged = removed and isinstance(error, DamagedFile)
            self._fail(job, f"{path} is not read: {error}", disk_damaged=int(is_damaged))
            return
        with contextlib.suppress(OSError):
            os.utime(path)  # keeps the order of use across a restart
        with self._lock:
            is_over = job.state is _State.ENDED
            if not is_over:
                job.state = _State.FILLING
                del self._running[job]
        self._index.touch(job.key)
        if is_over:
            return
        files.copy_page(self._slab.address(job.host_slot))
        self._slab.checksums[job.host_slot] = total
        seconds, size = time.perf_counter() - begin, self._slab.slot_bytes
        self._succeed(job, disk_reads=1, disk_read_bytes=size, disk_read_seconds=seconds)

    # On any thread.

    def _fail(self, job: _Job, error: str, **changes: float) -> None:
        if self._end(job):
            self._tell_failure(job, error, **changes)

    def _succeed(self, job: _Job, **changes: float) -> None:
        if self._end(job):
            self._tell(job, None, **changes)

    def _end(self, job: _Job) -> bool:
        """Ends a job. Returns False if it had already ended."""
        with self._lock:
            if job.state is _State.ENDED:
                return False
            job.state = _State.ENDED
            self._running.pop(job, None)
            return True

    def _tell_failure(self, job: _Job, error: str, **changes: float) -> None:
        kind, failed = "reading", "disk_reads_failed"
        if job.is_put:
            kind, failed = "writing", "disk_writes_failed"
        if not self._closed and kind not in self._warned:
            self._warned.add(kind)
            log.warning(
                "%s a page on disk failed: %s. Further failures are only counted", kind, error
            )
        self._tell(job, error, **{failed: 1, **changes})

    def _tell(self, job: _Job, error: str | None, **changes: float) -> None:
        self._news.append(_News(Completion(job.tag, error is None, error), changes))
        self._wake_up()

    def _count(self, **changes: float) -> None:
        if any(changes.values()):
            self._news.append(_News(None, changes))
            self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of `wake` is closed
            self._wake()
