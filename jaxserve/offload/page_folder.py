"""A folder of page files. Each process has its own directory in it.

    FOLDER/<digest of the fingerprint>[-1, -2, …]/<the page's hash>.kv
                                                  /lock

The process that holds the lock of a directory owns it. A second process with the same fingerprint
takes the next number, and finds its directory again after a restart. A directory that nobody holds
is left over from another model or earlier settings; its files may be removed.
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
"""The system's 64-bit `struct flock`: type, whence, start, length, process."""


class FolderError(RuntimeError):
    """The folder cannot hold pages, for a reason that the user can fix."""


class PageFile(NamedTuple):
    """A page file found by a scan."""

    path: Path
    key: bytes
    size: int
    """Size in bytes."""
    used: int
    """Time of the last read or write, in nanoseconds."""


class PageFolder:
    """The directory of this process. Any thread may call its methods.

    Attributes:
      fingerprint: 32 bytes, the digest of the fingerprint text.
      directory: the directory with this process's pages.
    """

    def __init__(self, folder: Path, fingerprint: str):
        """Creates and locks a directory.

        Args:
          folder: created if it does not exist.
          fingerprint: names everything that the meaning of a page's bytes depends on.

        Raises:
          FolderError: no directory there can be created, locked or trusted.
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
                raise FolderError(f"{directory} is not a directory that this user owns")
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
        """Returns the path of a page's file, which may not exist."""
        return self.directory / f"{key.hex()}.kv"

    def temporary(self, number: int) -> Path:
        """Returns a temporary name for a file that is being written."""
        return self.directory / f"{self._mark}-{number}{_TEMPORARY}"

    def restore(self) -> None:
        """Creates the directory again if it was removed. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def scan(self, file_bytes: int, is_over: Callable[[], bool]) -> tuple[list[PageFile], int]:
        """Returns the page files, least recently used first, and the number of damaged files.

        Removes files that cannot be whole pages: remains of interrupted writes, and files of
        another size than `file_bytes`. Keeps unknown files. Stops early if `is_over`.
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
        """Returns the files of each directory that nobody holds, least recently used first."""
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
        """Releases the directory. Further calls do nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_held(directory: Path) -> bool:
    """Returns whether a process owns a directory. Takes no lock."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's directory
    try:
        answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
    except OSError:
        return True
    finally:
        os.close(lock)


def remove(path: Path) -> bool:
    """Removes a file if the system allows it. Returns whether there was one."""
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
