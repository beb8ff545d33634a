"""The host heap: garbage collection and malloc settings during and after the start."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_THRESHOLDS = (10_000, 20, 50)
"""Thresholds of the garbage collector; Python's defaults are 700, 10, 10. A collection stops all
threads. With 256 streams, the defaults collected 13 times per 10,000 tokens. A collection took 1.5
ms and sometimes 70 ms (scripts/bench_http.py on two busy cores). Most objects of a request are in
no reference cycle."""

_M_MXFAST, _FASTEST_BYTES = 1, 128
"""A parameter of glibc's `mallopt`, and its default: the largest freed piece that goes to a fast
bin, where it is not merged with its neighbours."""

_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ([rwxsp-]{4}) \S+ \S+ \S+ *(.*)$")


def import_freely() -> None:
    """Turns off garbage collection until `imported`, because imports create many lasting objects
    and little garbage. Also turns off malloc's fast bins until `settle`. XLA frees a million small
    pieces while it loads programs. Every large allocation would search the fast bins for them."""
    gc.disable()
    _keep_apart(0)


def imported() -> None:
    """Turns on rare collections, and excludes all current objects from them."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def settle() -> None:
    """Returns freed memory to the system. From now on, collections are rare and only cover new
    objects.

    Compiling leaves gigabytes in the C library's free lists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    _keep_apart(_FASTEST_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # not glibc, or not Linux
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        forget_clean_pages(library)


def _keep_apart(size: int) -> None:
    """Lets malloc keep freed pieces of up to `size` bytes in fast bins; 0: none."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc, or not Linux
        ctypes.CDLL(None).mallopt(_M_MXFAST, size)


def forget_clean_pages(library: ctypes.CDLL) -> None:
    """Unmaps clean file pages, because start-up reads 400 MB of libraries that serving does not
    need.

    The pages stay in the system's page cache and are mapped again on use.
    """
    for start, end in _clean_mappings():
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _clean_mappings() -> Iterator[tuple[int, int]]:
    """Yields the address ranges of mapped files that the process can not write and has not
    written."""
    place = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _MAPPING.match(line):  # on any mapping: the next figures belong to it
            start, end, rights, path = found.groups()
            file = path.startswith("/") and not path.startswith("/dev/")
            private = rights[1] == "-" and rights[3] == "p"
            place = (int(start, 16), int(end, 16)) if file and private else None
        elif line.startswith("Anonymous:") and place is not None and line.split()[1] == "0":
            yield place
