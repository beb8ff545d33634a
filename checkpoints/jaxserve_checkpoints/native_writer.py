"""Writes the engine's own checkpoint, and goes on where an earlier writer was killed.

    .jaxserve.safetensors.partial    the file to be, at its full size from the start
    .jaxserve.safetensors.journal    what it is made from, then each tensor that is written

A tensor is noted in the journal after its bytes, with their checksum, and believed by the next
writer only if the bytes still have it. The file gets its header and its name when everything has
been read back. Writers of one folder exclude each other by a lock on the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import threading
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve_checkpoints.native import FILE, METADATA, Description, checksum
from jaxserve_checkpoints.reader import DTYPES, AnyArray, CheckpointError

_PARTIAL, _JOURNAL = f".{FILE}.partial", f".{FILE}.journal"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NO_CHECKSUM = "0" * 16
_LENGTH_BYTES = 8


class _Place(NamedTuple):
    """A tensor, and its bytes [start, end) behind the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class Busy(CheckpointError):
    """Another process writes into the folder."""


class NativeWriter:
    """One file under way; to be used in a `with`. `write` may be called from several threads."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Any],
        made_from: Mapping[str, Any],
        types: Mapping[str, str],
    ):
        """
        Args:
          tensors: anything with shape and dtype for each name, in the order of the file.

        Raises:
          Busy: another process is at it.
          CheckpointError: the disk has no room for the file.
          OSError: the folder cannot be made or written.
        """
        self._folder = folder
        self._made_from, self._types = made_from, types
        self._places = _places(tensors)
        head = _header(self._places, self._describe({}))
        self._identity = hashlib.sha256(head).hexdigest()
        self._start = len(head)
        self._size = self._start + max(place.end for place in self._places.values())
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(folder))
            self._checksums = self._resume()
            self._file = os.open(folder / _PARTIAL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, self._file)
            self._allocate()
            self._map = mmap.mmap(self._file, self._size, access=mmap.ACCESS_READ)
            self._forget_damaged()
            self._journal = stack.enter_context((folder / _JOURNAL).open("w", encoding="utf-8"))
            self._note(self._identity)
            for name, value in self._checksums.items():
                self._note(f"{value} {name}")
            self._resources = stack.pop_all()
        self._lock = threading.Lock()

    def __enter__(self) -> NativeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def written(self) -> frozenset[str]:
        """Names of the tensors that are there."""
        return frozenset(self._checksums)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self._size

    def write(self, name: str, array: AnyArray) -> None:
        """OSError: the disk is full or fails; what is written so far stays for the next writer."""
        place = self._places[name]
        assert (array.dtype, array.shape) == (place.dtype, place.shape), name
        content = np.ascontiguousarray(array)
        value = checksum(content)
        view = memoryview(content.reshape(-1).view(np.uint8))
        done = 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], self._start + place.start + done)
        with self._lock:
            self._checksums[name] = value
            self._note(f"{value} {name}")

    def finish(self) -> Path:
        """Read everything back and give the file its name.

        Raises:
          CheckpointError: what is read is not what was written.
        """
        missing = self._places.keys() - self._checksums.keys()
        assert not missing, missing
        damaged = self._forget_damaged()
        if damaged:
            raise CheckpointError(
                f"{self._folder / _PARTIAL}: {len(damaged)} tensors read back other bytes than "
                f"were written, {damaged[0]} is the first: the disk or its memory is failing"
            )
        os.pwrite(self._file, _header(self._places, self._describe(self._checksums)), 0)
        os.fsync(self._file)
        os.replace(self._folder / _PARTIAL, self._folder / FILE)
        (self._folder / _JOURNAL).unlink()
        _sync_folder(self._folder)
        return self._folder / FILE

    def _describe(self, checksums: Mapping[str, str]) -> Description:
        return Description(made_from=self._made_from, types=self._types, checksums=checksums)

    def _resume(self) -> dict[str, str]:
        """Checksums in the journal of an earlier writer of the same file."""
        try:
            lines = (self._folder / _JOURNAL).read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return {}
        if lines[0] != self._identity or not (self._folder / _PARTIAL).exists():
            return {}
        noted = (line.partition(" ") for line in lines[1:-1])  # the last line may be cut off
        return {name: value for value, _, name in noted if name in self._places}

    def _allocate(self) -> None:
        """The whole file now, so that a disk without room says so before any work is done."""
        try:
            os.ftruncate(self._file, self._size)  # that of another conversion may be longer
            os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            discard(self._folder)
            free = shutil.disk_usage(self._folder).free
            raise CheckpointError(
                f"{self._folder}: the converted weights take {_in_words(self._size)}, "
                f"{_in_words(free)} are free ({error.strerror})"
            ) from None

    def _forget_damaged(self) -> list[str]:
        """Drop, and return, names whose bytes in the file do not have their checksums."""
        damaged = [name for name, value in self._checksums.items() if self._read(name) != value]
        for name in damaged:
            del self._checksums[name]
        return damaged

    def _read(self, name: str) -> str:
        """The checksum of what the file holds; its pages do not stay in this process's memory."""
        place = self._places[name]
        start, size = self._start + place.start, place.end - place.start
        value = checksum(np.frombuffer(self._map, np.uint8, size, start))
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)
        return value

    def _note(self, line: str) -> None:
        self._journal.write(line + "\n")
        self._journal.flush()


def _in_words(size: int) -> str:
    """Rounded so that two sizes that differ by a hundredth are seen to."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def discard(folder: Path) -> None:
    """Remove the checkpoint, and what a writer that did not finish left."""
    for name in (_PARTIAL, _JOURNAL, FILE):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _places(tensors: Mapping[str, Any]) -> dict[str, _Place]:
    """Without gaps, as the format wants it: first what fills whole pages, then by alignment."""
    whole, rest = [], []
    for name, each in tensors.items():
        dtype = np.dtype(each.dtype)
        size = math.prod(each.shape) * dtype.itemsize
        (rest if size % mmap.PAGESIZE else whole).append((name, dtype, tuple(each.shape), size))
    rest.sort(key=lambda each: -each[1].itemsize)
    places: dict[str, _Place] = {}
    position = 0
    for name, dtype, shape, size in (*whole, *rest):
        places[name] = _Place(dtype, shape, position, position + size)
        position += size
    return places


def _header(places: Mapping[str, _Place], description: Description) -> bytes:
    """Length and JSON, filled up to whole pages; as long whatever the checksums are."""
    checksums = dict.fromkeys(places, _NO_CHECKSUM) | dict(description.checksums)
    described = replace(description, checksums=checksums).to_json()
    content: dict[str, Any] = {"__metadata__": {METADATA: described}}
    for name, place in places.items():
        content[name] = {
            "dtype": _CODES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.start, place.end),
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % mmap.PAGESIZE)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """The only writer of the folder, until the process ends at the latest."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{folder}: another process is converting into this folder") from None
        yield
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """The new name survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
