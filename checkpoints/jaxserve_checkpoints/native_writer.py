"""Writes the engine's own checkpoint, and continues where an earlier writer was killed.

    .jaxserve.safetensors.partial    the unfinished file, at its full size from the start
    .jaxserve.safetensors.journal    source and settings, then an entry for each written tensor

Files of Hugging Face's tensors are written in the same way, under their own name.

A tensor's journal entry is written after the tensor's bytes, and has their checksum. The next
writer keeps the tensor only if the bytes still match. When all tensors are written they are read
back; only then the file gets its header and its name. A lock on the folder excludes other writers.
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

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NO_CHECKSUM = "0" * 16
_LENGTH_BYTES = 8


class _Place(NamedTuple):
    """A tensor's name and its bytes [start, end) after the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class Busy(CheckpointError):
    """Another process writes into the folder."""


class NativeWriter:
    """Writes one file; use it in a `with` statement. Several threads may call `write`."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Any],
        made_from: Mapping[str, Any],
        types: Mapping[str, str],
        *,
        file: str = FILE,
    ):
        """Creates or continues the file.

        Args:
          tensors: an object with shape and dtype for each name, in file order.
          made_from, types: see `native.Description`.
          file: the file's name.

        Raises:
          Busy: another process writes into the folder.
          CheckpointError: the disk has too little room.
          OSError: the folder cannot be created or written.
        """
        self._folder = folder
        self._target = folder / file
        self._partial, self._journal_file = _working_files(folder, file)
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
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, self._file)
            self._allocate()
            self._map = mmap.mmap(self._file, self._size, access=mmap.ACCESS_READ)
            self._forget_damaged()
            self._journal = stack.enter_context(self._journal_file.open("w", encoding="utf-8"))
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
        """Names of the tensors that have been written."""
        return frozenset(self._checksums)

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self._size

    def write(self, name: str, array: AnyArray) -> None:
        """Writes one tensor.

        Raises:
          OSError: the disk is full or fails. The next writer keeps the tensors written so far.
        """
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
        """Reads everything back and gives the file its name.

        Raises:
          CheckpointError: the bytes read differ from those written.
        """
        missing = self._places.keys() - self._checksums.keys()
        assert not missing, missing
        damaged = self._forget_damaged()
        if damaged:
            raise CheckpointError(
                f"{self._partial}: {len(damaged)} tensors read back other bytes than "
                f"were written, {damaged[0]} is the first: the disk or its memory is failing"
            )
        os.pwrite(self._file, _header(self._places, self._describe(self._checksums)), 0)
        os.fsync(self._file)
        os.replace(self._partial, self._target)
        self._journal_file.unlink()
        _sync_folder(self._folder)
        return self._target

    def _describe(self, checksums: Mapping[str, str]) -> Description:
        return Description(made_from=self._made_from, types=self._types, checksums=checksums)

    def _resume(self) -> dict[str, str]:
        """Returns the checksums in the journal of an earlier writer of the same file."""
        try:
            lines = self._journal_file.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return {}
        if lines[0] != self._identity or not self._partial.exists():
            return {}
        noted = (line.partition(" ") for line in lines[1:-1])  # the last line may be cut off
        return {name: value for value, _, name in noted if name in self._places}

    def _allocate(self) -> None:
        """Allocate the whole file, so that a full disk is reported before any work is done."""
        try:
            os.ftruncate(self._file, self._size)  # the file of another conversion may be longer
            os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            discard(self._folder, self._target.name)
            free = shutil.disk_usage(self._folder).free
            raise CheckpointError(
                f"{self._folder}: the converted weights take {_in_words(self._size)}, "
                f"{_in_words(free)} are free ({error.strerror})"
            ) from None

    def _forget_damaged(self) -> list[str]:
        """Drop and return names whose bytes in the file do not match their checksums."""
        damaged = [name for name, value in self._checksums.items() if self._read(name) != value]
        for name in damaged:
            del self._checksums[name]
        return damaged

    def _read(self, name: str) -> str:
        """Returns the checksum of a tensor in the file. Its pages do not stay in the process's
        memory."""
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
    """Formats a size with enough digits to tell sizes apart that differ by 1 %."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def discard(folder: Path, file: str = FILE) -> None:
    """Removes a checkpoint, and the working files of an unfinished writer."""
    for each in (*_working_files(folder, file), folder / file):
        with contextlib.suppress(OSError):
            each.unlink()


def _working_files(folder: Path, file: str) -> tuple[Path, Path]:
    """Returns the unfinished file and its journal."""
    return folder / f".{file}.partial", folder / f".{file}.journal"


def _places(tensors: Mapping[str, Any]) -> dict[str, _Place]:
    """Returns each tensor's place. There are no gaps, as safetensors requires: tensors that fill
    whole pages come first, then the others by alignment."""
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
    """Returns the length and JSON, padded to whole pages. The size does not depend on the
    checksums."""
    checksums = dict.fromkeys(places, _NO_CHECKSUM) | dict(description.checksums)
    described = replace(description, checksums=checksums).to_json()
    # Hugging Face's libraries require a format; any framework with row-major tensors will do.
    content: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA: described}}
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
    """Holds the folder's lock. The system releases it when the process ends."""
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
    """Sync the folder, so that the new name survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
