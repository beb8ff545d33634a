"""A deep health check: `/health?deep=1` makes the engine generate a token."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing

from jaxserve.api import Engine, EngineFailed, FinishReason, Overloaded, Request, SamplingParams

PATIENCE = 5.0
"""Seconds that a caller waits for the token."""


class Probe:
    """Generates at most one token at a time, however many callers ask, because the route needs no
    key."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._running: asyncio.Task[float | None] | None = None

    async def seconds(self) -> float | None:
        """Returns the seconds that a token takes now. None if it takes longer than PATIENCE or the
        queue is full: a busy server must not be restarted.

        Raises EngineFailed if no token can be generated.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> float | None:
        request = Request(
            id=f"health-{uuid.uuid4().hex}", prompt=(0,), params=SamplingParams(max_tokens=1)
        )
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE):
                async with aclosing(self._engine.generate(request)) as stream:
                    async for events in stream:
                        if events[-1].finish not in (FinishReason.STOP, FinishReason.LENGTH):
                            raise EngineFailed("no token could be generated")
        except (TimeoutError, Overloaded):
            return None
        return time.perf_counter() - begun
