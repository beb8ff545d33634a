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

_M_MXFAST, _FASTEST_BYTES = 1, 128
"""A parameter of glibc's `mallopt`, the size up to which it keeps freed pieces apart
(fast bins), and its default."""

_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ([rwxsp-]{4}) \S+ \S+ \S+ *(.*)$")


def import_freely() -> None:
    """Turn off collections until `imported`. Imports create many lasting objects and little
    garbage. Until `settle` the C library joins what is freed with its neighbours at once: XLA frees
    a million small pieces where it loads programs, and each large piece that it asks for would walk
    through those that are kept apart."""
    gc.disable()
    _keep_apart(0)


def imported() -> None:
    """Turn on collections, rare ones, and exclude all objects that exist now."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def settle() -> None:
    """Return freed memory to the system, and collect rarely and only new objects.

    Compiling leaves gigabytes in the C library's free lists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    _keep_apart(_FASTEST_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc, no Linux
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        forget_clean_pages(library)


def _keep_apart(size: int) -> None:
    """Let the C library keep freed pieces of up to so many bytes apart from their neighbours."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc, no Linux
        ctypes.CDLL(None).mallopt(_M_MXFAST, size)


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
