"""How long a request may wait for its first token, and take in all."""

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
"""OpenAI's and Anthropic's clients send it, in seconds."""


class Patience:
    """How long a request may wait for its first token, and take in all."""

    def __init__(self, waiting: float | None, ending: float | None, limit: asyncio.Timeout):
        """Until when, in the event loop's time; `limit` is that of the sooner."""
        self._ending, self._limit = ending, limit
        self.waits = waiting is not None and (ending is None or waiting < ending)

    def has_begun(self) -> None:
        """The first token is there: from now on only the time in all counts."""
        if self.waits:
            self.waits = False
            self._limit.reschedule(self._ending)


@asynccontextmanager
async def time_limit(
    service: Service, arrived: float, client_waits: float | None = None
) -> AsyncGenerator[Patience]:
    """Limits a request's time: 504 once it has taken as long as the configuration allows or as its
    client waits, in seconds; 503 once it has waited too long for its first token.

    `arrived`: when it came, by `time.perf_counter`.

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
    """Returns the seconds that the client waits for an answer that is not streamed, if it says
    so."""
    try:
        seconds = float(request.headers.get(READ_TIMEOUT_HEADER, "nan"))
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
