"""Files with one page each. A file is written completely or not at all, and verified when read.

A file is a header of one block and then the page. It is written under a temporary name and then
renamed. Nothing is flushed: a file that a power cut damages fails its checksum.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
from pathlib import Path

from jaxserve.offload.checksum import checksum

HEADER_BYTES = 4096
"""A multiple of every disk's block size, so that the page after it can bypass the file cache."""

HASH_BYTES = 32
_MAGIC = b"jaxsrvKV"
_VERSION = 1
_HEADER = struct.Struct("<8sQQ32s32sQ")
_SUM = struct.Struct("<Q")


class DamagedFile(Exception):
    """A file differs from the one written under its name: too short, foreign, or changed."""


class PageFiles:
    """Reads and writes page files through a buffer. Each thread needs its own object.

    Files bypass the file cache if the file system allows it, because pages that are read often are
    in host memory anyway.
    """

    def __init__(self, slot_bytes: int, stride: int, fingerprint: bytes):
        """
        Args:
          slot_bytes: bytes of a page.
          stride: bytes of a slot of host memory, a multiple of 4 KiB.
          fingerprint: 32 bytes, a digest of everything that the meaning of a page's bytes depends
            on.
        """
        self._slot_bytes, self._fingerprint = slot_bytes, fingerprint
        self.file_bytes = HEADER_BYTES + stride
        area = mmap.mmap(-1, self.file_bytes)
        self._buffer = memoryview(area)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._direct = os.O_DIRECT

    def write(self, path: Path, key: bytes, slot: memoryview) -> int:
        """Writes a new file and returns the page's checksum.

        Args:
          path: a file that does not exist yet.
          key: the page's hash, 32 bytes.
          slot: [stride], page-aligned. If it changes during the write, the file is damaged.

        Raises:
          OSError: the system's error. The file is removed if the system allows it.
        """
        total = checksum(slot[: self._slot_bytes])
        self._buffer[:HEADER_BYTES] = self._header(key, total)
        file = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._reserve(file)
            written = os.pwritev(file, [self._buffer[:HEADER_BYTES], slot], 0)
            if written != self.file_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(file)
        return total

    def read(self, path: Path, key: bytes) -> int:
        """Reads a page into the buffer, for `copy_page`, and returns its checksum.

        Raises:
          DamagedFile: the file is damaged; the message has the reason.
          OSError: the system's error.
        """
        file = self._open(path, os.O_RDONLY)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != self.file_bytes:
                raise DamagedFile(f"{status.st_size} bytes instead of {self.file_bytes}")
            if os.preadv(file, [self._buffer], 0) != self.file_bytes:
                raise DamagedFile("it ends early")
        finally:
            os.close(file)
        total = checksum(self._buffer[HEADER_BYTES:][: self._slot_bytes])
        if bytes(self._buffer[:HEADER_BYTES]) != self._header(key, total):
            raise DamagedFile("its header is not that of this page")
        return total

    def copy_page(self, target: int) -> None:
        """Copies the page read last to an address. Releases the interpreter lock."""
        ctypes.memmove(target, self._address + HEADER_BYTES, self._slot_bytes)

    def _header(self, key: bytes, total: int) -> bytes:
        """Returns a header, [HEADER_BYTES]: what the page is, its checksum, and the header's
        checksum."""
        fields = (_MAGIC, _VERSION, self._slot_bytes, self._fingerprint, key, total)
        packed = _HEADER.pack(*fields)
        return (packed + _SUM.pack(checksum(packed))).ljust(HEADER_BYTES, b"\0")

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | self._direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._direct = 0  # this file system cannot bypass the file cache
        with contextlib.suppress(OSError):  # some systems create the file before they refuse
            if flags & os.O_EXCL:
                os.unlink(path)
        return os.open(path, flags, 0o600)

    def _reserve(self, file: int) -> None:
        """Allocates the file's space first, so that a full disk is noticed before the page is
        written."""
        try:
            os.posix_fallocate(file, 0, self.file_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
