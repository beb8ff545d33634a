"""Time limits of a request: for its first token, and for the whole answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from jaxserve.server.errors import ApiError
from jaxserve.server.service import Service

READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
"""A header of OpenAI's and Anthropic's clients, in seconds."""


class Patience:
    """The deadlines of a request: for its first token, and for the whole answer."""

    def __init__(self, waiting: float | None, ending: float | None, limit: asyncio.Timeout):
        """`waiting` and `ending`: deadlines by the event loop's clock. `limit`: set to the earlier
        one."""
        self._ending, self._limit = ending, limit
        self.waits = waiting is not None and (ending is None or waiting < ending)

    def has_begun(self) -> None:
        """Reports the first token. From now on only the deadline of the whole answer counts."""
        if self.waits:
            self.waits = False
            self._limit.reschedule(self._ending)


@asynccontextmanager
async def time_limit(
    service: Service, arrived: float, client_waits: float | None = None
) -> AsyncGenerator[Patience]:
    """Limits a request's time. Raises 504 after the time that the configuration allows or the
    client waits, and 503 if the first token takes too long.

    Args:
      arrived: time of arrival by `time.perf_counter`.
      client_waits: seconds that the client waits; None: unknown.

    Raises:
      ApiError: 503 or 504, in the body of the `async with`.
    """
    queue, takes = service.config.max_queue_time, service.config.request_timeout
    in_all = min((limit for limit in (takes, client_waits) if limit is not None), default=None)
    start = asyncio.get_running_loop().time() - (time.perf_counter() - arrived)
    waiting, ending = (None if limit is None else start + limit for limit in (queue, in_all))
    first = min((end for end in (waiting, ending) if end is not None), default=None)
    patience = None
    try:
        async with asyncio.timeout_at(first) as limit:
            patience = Patience(waiting, ending, limit)
            yield patience
    except TimeoutError:
        if patience is not None and patience.waits:
            raise ApiError(
                503,
                f"the request has waited for {queue:g} seconds, the longest allowed here",
                code="queue_timeout",
                retry_after=service.backlog.seconds_to_drain(),
            ) from None
        raise ApiError(
            504, f"the request took longer than the {in_all:g} seconds allowed", code="timeout"
        ) from None


def read_timeout(request: web.Request) -> float | None:
    """Returns the seconds that the client waits for an answer without streaming; None if it does
    not say."""
    try:
        seconds = float(request.headers.get(READ_TIMEOUT_HEADER, "nan"))
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
