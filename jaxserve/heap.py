"""The process's own memory, once everything that stays is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_THRESHOLDS = (10_000, 20, 50)
"""Python's own are 700, 10, 10. A collection looks at what is new while all threads wait: with 256
streams that was 13 times per 10,000 tokens, for 1.5 ms and now and then 70 (scripts/bench_http.py
on two busy cores). Most objects of a request are in no cycle and go without it."""


def settle() -> None:
    """Give freed memory back to the system, and collect seldom and only what is made from now on.

    Compiling leaves gigabytes in the C library's free lists.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
