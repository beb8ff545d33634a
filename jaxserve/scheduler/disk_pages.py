"""Pages in files below the host's memory, as the scheduler sees them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.scheduler.transfers import Ended, Then

_WRITES, _READS = 64, 32
"""The most files that are written and read at a time. More would wait behind one another, and each
keeps a host slot."""


class Disk(Protocol):
    """A folder of pages. No method waits for a file.

    Each tag comes back once, in any order, and then nothing touches its host slot any more.
    """

    def contains(self, key: bytes, /) -> bool: ...

    def get(self, key: bytes, host_slot: int, tag: int, /) -> None:
        """Read a page into a host slot. One that cannot be read is not there any more."""
        ...

    def put(self, key: bytes, host_slot: int, tag: int, /) -> None:
        """Write a host slot, which does not change before the end."""
        ...

    def poll(self) -> Sequence[Ended]:
        """Returns the reads and writes that ended since the last call."""
        ...


class DiskPages:
    """Reads and writes in flight. With no disk nothing is there, and nothing is written."""

    def __init__(self, disk: Disk | None):
        self._disk = disk
        self._ends: dict[int, Callable[[str | None], None]] = {}
        self._reads = self._writes = self._tag = 0
        self._salt = b""
        """Of the keys since the last `forget`."""

    @property
    def busy(self) -> bool:
        return bool(self._ends)

    @property
    def exists(self) -> bool:
        return self._disk is not None

    @property
    def can_read(self) -> bool:
        """Fewer files are being read than may be."""
        return self._reads < _READS

    @property
    def can_write(self) -> bool:
        """There is a disk, and fewer files are being written than may be."""
        return self._disk is not None and self._writes < _WRITES

    def contains(self, key: bytes) -> bool:
        """Returns whether a page is there. False of one that is still being written."""
        return self._disk is not None and self._disk.contains(self._salted(key))

    def read(self, key: bytes, host_slot: int, then: Then) -> None:
        """Read a page that is there into a host slot. `then` is called with what went wrong."""
        assert self._disk is not None
        self._reads += 1

        def ended(error: str | None) -> None:
            self._reads -= 1
            then(error)

        self._disk.get(self._salted(key), host_slot, self._begin(ended))

    def write(self, key: bytes, host_slot: int, then: Then) -> None:
        """Write a page, if `can_write`. The slot must not change until `then` is called."""
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
        """Take note of what has ended."""
        if self._disk is not None:
            for each in self._disk.poll():
                self._ends.pop(each.tag)(None if each.ok else each.error or "unknown")

    def forget(self) -> None:
        """Find nothing that was written before, here or by a later start: its weights are others.
        What earlier starts wrote with the weights of the start is left to later ones."""
        self._salt = os.urandom(16)

    def _salted(self, key: bytes) -> bytes:
        return hashlib.sha256(self._salt + key).digest() if self._salt else key
