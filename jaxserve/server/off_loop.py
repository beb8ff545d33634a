"""Runs work on large requests in threads, so that other requests' tokens do not wait for it."""

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
"""Prompts of bodies up to this size are made on the event loop. 8 KiB take about 1.5 ms; a hop to a
thread takes 0.1 ms."""
PARSED_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop. That takes 0.5 ms, in the worst case about
20."""
HUGE_BYTES = 1024 * 1024
"""From this size on, bodies are processed one at a time."""
MAX_THREADS = 4
"""Most of the work holds Python's lock, so more threads do not finish it sooner. Each further
thread delays the engine thread by a millisecond whenever it takes the lock back."""


class Lane(IntEnum):
    """Where work runs."""

    INLINE = 0
    """At once, on the event loop."""
    LARGE = 1
    HUGE = 2
    """In a thread, one at a time."""


_threads = {
    Lane.LARGE: ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="large requests"),
    Lane.HUGE: ThreadPoolExecutor(1, thread_name_prefix="huge requests"),
}
_job = threading.local()

GIVE_BACK_SECONDS = 5.0
"""Seconds from huge work to the return of its memory, and so at least between two returns."""
_to_give_back: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""Event loops for which a return of memory is scheduled."""


class Abandoned(Exception):
    """No request waits for the work any more."""


def lane(size: int, inline: int = INLINE_BYTES) -> Lane:
    """Returns where to run work on a body of `size` bytes."""
    if size <= inline:
        return Lane.INLINE
    return Lane.LARGE if size < HUGE_BYTES else Lane.HUGE


def check_wanted() -> None:
    """Ends long work early: raises Abandoned if its request is over. Long work calls this
    periodically."""
    abandoned: threading.Event | None = getattr(_job, "abandoned", None)
    if abandoned is not None and abandoned.is_set():
        raise Abandoned


async def off_loop[**P, T](
    where: Lane, work: Callable[P, T], *args: P.args, **named: P.kwargs
) -> T:
    """Returns `work(*args)`, computed in a thread if it is long. If the request is cancelled, work
    that has not begun never does, and running work ends at its next `check_wanted`."""
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
    """Returns freed memory to the system, in a thread. The C library keeps memory that lies between
    pieces in use: 200 MB after a few bodies of 16 MB."""
    _to_give_back.discard(loop)
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        _threads[Lane.HUGE].submit(ctypes.CDLL(None).malloc_trim, 0)


def _run[T](abandoned: threading.Event, work: Callable[[], T]) -> T:
    _job.abandoned = abandoned
    return work()
