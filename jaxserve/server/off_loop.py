"""Work on large requests, in threads: other requests' tokens must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INLINE_BYTES = 8 * 1024
"""Of a body from which a prompt is made. 8 KiB take about 1.5 ms, a hop to a thread 0.1 ms."""
PARSED_INLINE_BYTES = 64 * 1024
"""Of a body that is only parsed: 0.5 ms, and at the worst some 20."""


async def off_loop[**P, T](long: bool, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """`work(*args)`, in a thread if it is long."""
    if long:
        return await asyncio.to_thread(work, *args, **named)
    return work(*args, **named)
