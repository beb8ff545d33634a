"""Work on large requests, in threads: other requests' tokens must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

INLINE_BYTES = 8 * 1024
"""Of a body from which a prompt is made. 8 KiB take about 1.5 ms, a hop to a thread 0.1 ms."""
PARSED_INLINE_BYTES = 64 * 1024
"""Of a body that is only parsed: 0.5 ms, and at the worst some 20."""
MAX_THREADS = 4
"""Most of the work holds Python's lock: it is not done sooner by more threads, and for each of them
the engine's waits a millisecond longer whenever it takes the lock back."""

_threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="large requests")


async def off_loop[**P, T](long: bool, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """`work(*args)`, in a thread if it is long."""
    if long:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, partial(work, *args, **named))
    return work(*args, **named)
