"""The process's own memory: while it starts, and once everything that stays is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_THRESHOLDS = (10_000, 20, 50)
"""Python's own are 700, 10, 10. A collection looks at what is new while all threads wait: with 256
streams that was 13 times per 10,000 tokens, for 1.5 ms and now and then 70 (scripts/bench_http.py
on two busy cores). Most objects of a request are in no cycle and go without it."""

_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ([rwxsp-]{4}) \S+ \S+ \S+ *(.*)$")


def import_freely() -> None:
    """No collections until `imported`: imports leave much that stays and hardly any garbage."""
    gc.disable()


def imported() -> None:
    """Collect again, but never look at what is there by now."""
    gc.freeze()
    gc.enable()


def settle() -> None:
    """Give freed memory back to the system, and collect seldom and only what is made from now on.

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
    """Unmap what files hold as well: 400 MB of libraries were read for what only a start does.

    The pages stay in the system's cache, and each comes back, with its neighbours, when it is used.
    """
    for start, end in _clean_mappings():
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _clean_mappings() -> Iterator[tuple[int, int]]:
    """Addresses of files mapped into this process that it cannot write, and has not written."""
    place = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _MAPPING.match(line):  # of whatever kind: its figures are not the last one's
            start, end, rights, path = found.groups()
            file = path.startswith("/") and not path.startswith("/dev/")
            private = rights[1] == "-" and rights[3] == "p"
            place = (int(start, 16), int(end, 16)) if file and private else None
        elif line.startswith("Anonymous:") and place is not None and line.split()[1] == "0":
            yield place
