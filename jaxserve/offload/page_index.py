"""The index of pages in a folder, in order of use, within a limit of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from jaxserve.offload.page_folder import PageFile, PageFolder, is_held, remove


class PageIndex:
    """The pages of a `PageFolder`. Any thread may call it. Only `make_room` waits for the disk.

    Files left over from other models or settings count too, and are removed first.
    """

    def __init__(self, folder: PageFolder, file_bytes: int, max_bytes: int):
        """
        Args:
          file_bytes: size of every file.
          max_bytes: at least `file_bytes` times the number of threads that write.
        """
        self._folder, self._file_bytes, self._max_bytes = folder, file_bytes, max_bytes
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._writing: set[bytes] = set()
        self._left_over: dict[Path, list[PageFile]] = {}
        self._left_over_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, left-over ones included."""
        return len(self._keys) * self._file_bytes + self._left_over_bytes

    def fill(self, found: Sequence[PageFile], left_over: dict[Path, list[PageFile]]) -> None:
        """Adds the results of a scan, as used before all known pages.

        Args:
          found: page files, least recently used first.
          left_over: files in directories that nobody holds, in the same order.
        """
        with self._lock:
            known = self._keys
            self._keys = OrderedDict.fromkeys(file.key for file in found)
            for key in known:
                self._keys[key] = None
                self._keys.move_to_end(key)
            self._left_over = left_over
            self._left_over_bytes = sum(map(_size, left_over.values()))

    def begin(self, key: bytes) -> bool:
        """Returns whether to write a page now. False if it is present or being written."""
        with self._lock:
            if key in self._keys:
                self._keys.move_to_end(key)
                return False
            if key in self._writing:
                return False
            self._writing.add(key)
            return True

    def end(self, key: bytes, *, written: bool) -> None:
        """Reports the end of a write from `begin`, and whether the page was written."""
        with self._lock:
            self._writing.discard(key)
            if written:
                self._keys[key] = None

    def touch(self, key: bytes) -> None:
        """Reports that a page was read, and is therefore present."""
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Reports that a page is gone or cannot be read."""
        with self._lock:
            self._keys.pop(key, None)

    def make_room(self) -> int:
        """Removes files until all pages fit, those being written included. Returns how many."""
        removed = 0
        while (victim := self._victim()) is not None:
            path, directory = victim
            if directory is not None and is_held(directory):
                with self._lock:  # a process took the directory since the scan
                    self._left_over_bytes -= _size(self._left_over.pop(directory, []))
            else:
                removed += remove(path)
        return removed

    def _victim(self) -> tuple[Path, Path | None] | None:
        """Returns a file to remove; and its directory, if that is left over."""
        with self._lock:
            files = len(self._keys) + len(self._writing)
            if files * self._file_bytes + self._left_over_bytes <= self._max_bytes:
                return None
            for directory, left_over in self._left_over.items():
                if left_over:
                    file = left_over.pop(0)
                    self._left_over_bytes -= file.size
                    return file.path, directory
            if not self._keys:
                return None
            key, _ = self._keys.popitem(last=False)
            return self._folder.path(key), None


def _size(files: Sequence[PageFile]) -> int:
    return sum(file.size for file in files)
