"""The scheduler's view of pages in files, the tier below host memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.scheduler.transfers import Ended, Then

_WRITES, _READS = 64, 32
"""The most files to write and to read at one time. More would only queue, and each occupies a host
slot."""


class Disk(Protocol):
    """A folder of pages. No method waits for a file.

    `poll` returns each tag once, in any order. After that nothing accesses its host slot.
    """

    def contains(self, key: bytes, /) -> bool: ...

    def get(self, key: bytes, host_slot: int, tag: int, /) -> None:
        """Reads a page into a host slot. A page that cannot be read is removed."""
        ...

    def put(self, key: bytes, host_slot: int, tag: int, /) -> None:
        """Writes a host slot to a file. The slot must not change before the write ends."""
        ...

    def poll(self) -> Sequence[Ended]:
        """Returns the reads and writes that ended since the last call."""
        ...


class DiskPages:
    """Tracks reads and writes in flight. Without a disk it finds and writes nothing."""

    def __init__(self, disk: Disk | None):
        self._disk = disk
        self._ends: dict[int, Callable[[str | None], None]] = {}
        self._reads = self._writes = self._tag = 0
        self._salt = b""
        """Prefix of the keys since the last `forget`."""

    @property
    def busy(self) -> bool:
        return bool(self._ends)

    @property
    def exists(self) -> bool:
        return self._disk is not None

    @property
    def can_read(self) -> bool:
        """Whether the number of reads is below its limit."""
        return self._reads < _READS

    @property
    def can_write(self) -> bool:
        """Whether there is a disk and the number of writes is below its limit."""
        return self._disk is not None and self._writes < _WRITES

    def contains(self, key: bytes) -> bool:
        """Returns whether a page is on disk. False while it is being written."""
        return self._disk is not None and self._disk.contains(self._salted(key))

    def read(self, key: bytes, host_slot: int, then: Then) -> None:
        """Reads a page on disk into a host slot. Calls `then` with the error, or None."""
        assert self._disk is not None
        self._reads += 1

        def ended(error: str | None) -> None:
            self._reads -= 1
            then(error)

        self._disk.get(self._salted(key), host_slot, self._begin(ended))

    def write(self, key: bytes, host_slot: int, then: Then) -> None:
        """Writes a page; requires `can_write`. The slot must not change until `then` is called."""
        assert self._disk is not None
        self._writes += 1

        def ended(error: str | None) -> None:
            self._writes -= 1
            then(error)

        self._disk.put(self._salted(key), host_slot, self._begin(ended))

    def _begin(self, ended: Then) -> int:
        self._tag += 1
        self._ends[self._tag] = ended
        return self._tag

    def advance(self) -> None:
        """Handles reads and writes that have ended."""
        if self._disk is not None:
            for each in self._disk.poll():
                self._ends.pop(each.tag)(None if each.ok else each.error or "unknown")

    def forget(self) -> None:
        """Hides all pages written before, because the weights have changed. Later starts do not
        find them either. They do find pages of earlier starts that used the weights of this
        start."""
        self._salt = os.urandom(16)

    def _salted(self, key: bytes) -> bytes:
        return hashlib.sha256(self._salt + key).digest() if self._salt else key
