"""The process's own memory: garbage collection during and after the start."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_THRESHOLDS = (10_000, 20, 50)
"""Thresholds of the garbage collector; Python's defaults are 700, 10, 10. A collection stops all
threads. With 256 streams the defaults collected 13 times per 10,000 tokens, for 1.5 ms and
sometimes 70 ms (scripts/bench_http.py on two busy cores). Most objects of a request are in no
cycle."""

_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ([rwxsp-]{4}) \S+ \S+ \S+ *(.*)$")


def import_freely() -> None:
    """Turn off collections until `imported`. Imports create many lasting objects and little
    garbage."""
    gc.disable()


def imported() -> None:
    """Turn on collections and exclude all objects that exist now."""
    gc.freeze()
    gc.enable()


def settle() -> None:
    """Return freed memory to the system, and collect rarely and only new objects.

    Compiling leaves gigabytes in the C library's free lists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc, no Linux
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        forget_clean_pages(library)


def forget_clean_pages(library: ctypes.CDLL) -> None:
    """Unmap clean file pages: start-up reads 400 MB of libraries that serving does not need.

    The pages stay in the system's page cache and come back when used.
    """
    for start, end in _clean_mappings():
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _clean_mappings() -> Iterator[tuple[int, int]]:
    """Yields the address ranges of mapped files that the process cannot write and has not
    written."""
    place = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _MAPPING.match(line):  # of whatever kind: its figures are not the last one's
            start, end, rights, path = found.groups()
            file = path.startswith("/") and not path.startswith("/dev/")
            private = rights[1] == "-" and rights[3] == "p"
            place = (int(start, 16), int(end, 16)) if file and private else None
        elif line.startswith("Anonymous:") and place is not None and line.split()[1] == "0":
            yield place
