"""A folder with files of pages, of which each process has a directory of its own.

    FOLDER/<digest of the fingerprint>[-1, -2, …]/<the page's hash>.kv
                                                  /lock

Who holds the lock of a directory owns it. A second process with the same fingerprint takes the next
number, and finds it again after a restart. Directories that nobody holds are left over, from other
models or earlier settings; their files may be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"[0-9a-f]{32}(-\d+)?")
_PAGE = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = ".tmp"
_LOCK = "lock"
_MOST_OWNERS = 64
_FLOCK = struct.Struct("hhqqi4x")
"""The system's `struct flock` with 64 bits: type, from where, start, length, process."""


class FolderError(RuntimeError):
    """A folder cannot hold pages, for a reason that the user can change."""


class PageFile(NamedTuple):
    """A file that was found."""

    path: Path
    key: bytes
    size: int
    """In bytes."""
    used: int
    """When it was written or read last, in nanoseconds."""


class PageFolder:
    """The directory of this process. Its methods may be called in any thread.

    Attributes:
      fingerprint: 32 bytes, the digest of the text.
      directory: where this process's pages lie.
    """

    def __init__(self, folder: Path, fingerprint: str):
        """Makes and locks a directory.

        Args:
          folder: made if it does not exist.
          fingerprint: all that the meaning of a page's bytes depends on.

        Raises:
          FolderError: no directory can be made, locked or trusted there.
        """
        self.fingerprint = sha256(fingerprint.encode()).digest()
        name = self.fingerprint.hex()[:32]
        self._folder, self._mark = folder, secrets.token_hex(8)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory, self._lock = self._take(name)
        except OSError as error:
            raise FolderError(f"{folder} cannot hold pages: {error}") from error

    def _take(self, name: str) -> tuple[Path, int]:
        for number in range(_MOST_OWNERS):
            directory = self._folder / (f"{name}-{number}" if number else name)
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise FolderError(f"{directory} is not a directory of this user's")
            directory.chmod(0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(directory / _LOCK, flags, 0o600)
            try:
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
            except BlockingIOError:
                os.close(lock)
                continue
            except OSError:
                os.close(lock)
                raise
            return directory, lock
        raise FolderError(f"{_MOST_OWNERS} processes already keep pages in {self._folder}")

    def path(self, key: bytes) -> Path:
        """Returns where a page lies, or would."""
        return self.directory / f"{key.hex()}.kv"

    def temporary(self, number: int) -> Path:
        """Returns a name for a file that is being written."""
        return self.directory / f"{self._mark}-{number}{_TEMPORARY}"

    def restore(self) -> None:
        """Make the directory again if somebody removed it. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def scan(self, file_bytes: int, is_over: Callable[[], bool]) -> tuple[list[PageFile], int]:
        """Returns the files of pages, those used longest ago first, and how many were damaged.

        Removes files that cannot be whole pages: what an interrupted write left, and those of
        another size than `file_bytes`. Other people's files stay. Stops early if `is_over`.
        """
        found: list[PageFile] = []
        damaged = 0
        for entry in _entries(self.directory):
            if is_over():
                break
            if entry.name.endswith(_TEMPORARY):
                if not entry.name.startswith(self._mark):
                    remove(Path(entry.path))
            elif file := _page_file(entry):
                if file.size == file_bytes:
                    found.append(file)
                else:
                    damaged += remove(file.path)
        found.sort(key=lambda file: file.used)
        return found, damaged

    def left_over(self) -> dict[Path, list[PageFile]]:
        """Returns the files of each directory that nobody holds, those used longest ago first."""
        found: dict[Path, list[PageFile]] = {}
        for each in _entries(self._folder):
            directory = Path(each.path)
            if directory == self.directory or not _NAME.fullmatch(each.name):
                continue
            if each.is_dir(follow_symlinks=False) and not is_held(directory):
                files = filter(None, map(_page_file, _entries(directory)))
                found[directory] = sorted(files, key=lambda file: file.used)
        return found

    def close(self) -> None:
        """Give the directory up; once is enough."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_held(directory: Path) -> bool:
    """Returns whether a process owns a directory; asking takes nothing from anybody."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to touch
    try:
        answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
    except OSError:
        return True
    finally:
        os.close(lock)


def remove(path: Path) -> bool:
    """Removes a file if the system lets us; returns whether there was one."""
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        yield from entries


def _page_file(entry: os.DirEntry[str]) -> PageFile | None:
    match = _PAGE.fullmatch(entry.name)
    if match is None:
        return None
    with contextlib.suppress(OSError):
        if entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            key = bytes.fromhex(match[1])
            return PageFile(Path(entry.path), key, status.st_size, status.st_mtime_ns)
    return None
