"""Whether the engine still makes tokens: `/health?deep=1` has it make one."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing

from jaxserve.api import Engine, EngineFailed, FinishReason, Overloaded, Request, SamplingParams

PATIENCE = 5.0
"""Seconds that whoever asks waits for the token."""


class Probe:
    """Generates at most one token at a time, however many ask: the route needs no key."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._running: asyncio.Task[float | None] | None = None

    async def seconds(self) -> float | None:
        """How long a token takes now. None: longer than PATIENCE, or the queue is full; a server
        that has much to do must not be restarted for it.

        Raises EngineFailed where none can be made.
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
