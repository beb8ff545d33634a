"""Work on large requests, in threads: other requests' tokens must not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from weakref import WeakSet

INLINE_BYTES = 8 * 1024
"""Of a body from which a prompt is made. 8 KiB take about 1.5 ms, a hop to a thread 0.1 ms."""
PARSED_INLINE_BYTES = 64 * 1024
"""Of a body that is only parsed: 0.5 ms, and at the worst some 20."""
HUGE_BYTES = 1024 * 1024
"""A body from which on requests wait for each other and for no one else."""
MAX_THREADS = 4
"""Most of the work holds Python's lock: it is not done sooner by more threads, and for each of them
the engine's waits a millisecond longer whenever it takes the lock back."""


class Lane(IntEnum):
    """Where work is done."""

    INLINE = 0
    """At once, on the event loop."""
    LARGE = 1
    HUGE = 2
    """One at a time."""


_threads = {
    Lane.LARGE: ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="large requests"),
    Lane.HUGE: ThreadPoolExecutor(1, thread_name_prefix="huge requests"),
}
_job = threading.local()

GIVE_BACK_SECONDS = 5.0
"""After huge work, and so between two times at least."""
_to_give_back: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""Loops on which memory is given back soon."""


class Abandoned(Exception):
    """Nobody waits for the work any more."""


def lane(size: int, inline: int = INLINE_BYTES) -> Lane:
    """Returns where work on a body of so many bytes is done."""
    if size <= inline:
        return Lane.INLINE
    return Lane.LARGE if size < HUGE_BYTES else Lane.HUGE


def check_wanted() -> None:
    """Ends long work early; the work calls this now and then. Raises Abandoned if its request is
    over."""
    abandoned: threading.Event | None = getattr(_job, "abandoned", None)
    if abandoned is not None and abandoned.is_set():
        raise Abandoned


async def off_loop[**P, T](
    where: Lane, work: Callable[P, T], *args: P.args, **named: P.kwargs
) -> T:
    """Returns `work(*args)`, computed in a thread if it is long. When the request is cancelled,
    work that has not begun never does, and work that has ends at its next `check_wanted`."""
    if where == Lane.INLINE:
        return work(*args, **named)
    abandoned = threading.Event()
    loop = asyncio.get_running_loop()
    try:
        job = partial(_run, abandoned, partial(work, *args, **named))
        return await loop.run_in_executor(_threads[where], job)
    finally:
        abandoned.set()
        if where == Lane.HUGE and loop not in _to_give_back:
            _to_give_back.add(loop)
            loop.call_later(GIVE_BACK_SECONDS, _give_back, loop)


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    """Freed memory to the system, in a thread. What is between things in use the C library keeps:
    after a few bodies of 16 MB these are 200 MB."""
    _to_give_back.discard(loop)
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        _threads[Lane.HUGE].submit(ctypes.CDLL(None).malloc_trim, 0)


def _run[T](abandoned: threading.Event, work: Callable[[], T]) -> T:
    _job.abandoned = abandoned
    return work()
