"""Streams the engine's state as events. All watchers share one poll on the event loop's thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from aiohttp import web

import jaxserve
from jaxserve.api import Engine
from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Distribution, Metrics
from jaxserve.server.errors import ApiError
from jaxserve.server.service import SERVICE
from jaxserve.server.sse import EventStream, named_event
from jaxserve.views import Occupancy, StepView, WaitingView

INTERVAL = 0.125
"""Seconds between two polls: at most 8 events a second."""

RARELY = 4
"""Polls between two reads of the pages, the queue and the distributions, which take longer."""

MAX_WATCHERS = 16
MAX_PAGES = 1536
"""Cells in the map of pages."""

DEADLINES = (0.0, 1.0, 5.0, 30.0)
"""Seconds left until the deadline, by which waiting sequences are counted."""

_MAX_LEVELS = 8
_MAX_BEHIND = 4
"""Events that a watcher may lag behind. Older ones are dropped."""

type Startup = Callable[[], Sequence[tuple[str, float, float]]]
"""Returns the phases of the start so far: name, begin and end in seconds."""


class Live:
    """Polls the engine, but only while somebody watches."""

    def __init__(self, engine: Engine, metrics: Metrics, config: ServerConfig, startup: Startup):
        self._engine = engine
        self._metrics = metrics
        self._config = config
        self._startup = startup
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncGenerator[bytes]:
        """Yields events until the server shuts down. Raises ApiError (429) if too many watch."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(
                429,
                f"{MAX_WATCHERS} clients watch already",
                code="too_many_watchers",
                retry_after=10.0,
            )
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield self._about()
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.discard(queue)
            if not self._watchers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def close(self) -> None:
        """Ends all streams."""
        for queue in self._watchers:
            queue.put_nowait(None)

    async def _look(self) -> None:
        last, looks, phase = 0, 0, self._engine.status().phase
        while True:
            await asyncio.sleep(INTERVAL)
            steps = self._engine.steps_since(last)
            last = steps[-1].number if steps else last
            body = self._tick(steps)
            if looks % RARELY == 0:
                body |= self._rarer()
            event = named_event("tick", body)
            if body["phase"] != phase:  # the start has finished its measurements
                phase = body["phase"]
                event += self._about()
            looks += 1
            for queue in self._watchers:
                if queue.qsize() >= _MAX_BEHIND:
                    queue.get_nowait()
                queue.put_nowait(event)

    def _about(self) -> bytes:
        """Returns facts that only change during the start."""
        figures, limits = self._metrics.figures(), self._engine.limits
        return named_event(
            "about",
            {
                "version": jaxserve.__version__,
                "model": self._config.model_names[0],
                "phase": self._engine.status().phase,
                "max_model_len": limits.max_model_len,
                "buckets": {
                    kind: [[size, _ms(seconds)] for size, seconds in times.items()]
                    for kind, times in self._engine.bucket_seconds().items()
                },
                "startup": [[name, _s(begin), _s(end)] for name, begin, end in self._startup()],
                "bounds": {"ttft": _bounds(figures.ttft), "tpot": _bounds(figures.tpot)},
                "deadlines": DEADLINES,
            },
        )

    def _tick(self, steps: Iterable[StepView]) -> dict[str, Any]:
        status = self._engine.status()
        return {
            "t": _s(time.monotonic()),
            "phase": status.phase,
            "progress": round(status.progress, 3),
            "running": status.running,
            "waiting": status.waiting,
            "free_pages": status.free_pages,
            "total_pages": status.total_pages,
            "tokens": self._metrics.tokens(),
            "steps": [_step(step) for step in steps],
        }

    def _rarer(self) -> dict[str, Any]:
        figures = self._metrics.figures()
        found: dict[str, Any] = {
            "prefix": [figures.looked_up, figures.found],
            "preemptions": figures.preemptions,
            "ttft": figures.ttft.counts,
            "tpot": figures.tpot.counts,
        }
        if figures.tier is not None:
            found["tier"] = figures.tier._asdict()
        occupancy = self._engine.occupancy(MAX_PAGES)
        if occupancy is not None:
            found |= {"pages": _pages(occupancy), "queue": _queue(occupancy.waiting)}
        return found


LIVE = web.AppKey("live", Live)


async def live_events(request: web.Request) -> web.StreamResponse:
    """`GET /ui/engine/events`."""
    config = request.app[SERVICE].config
    async with (
        contextlib.aclosing(request.app[LIVE].watch()) as events,
        EventStream(request, {}, config.keep_alive_interval) as stream,
    ):
        async for event in events:
            await stream.send(event)
    return stream.response


def _step(step: StepView) -> list[Any]:
    """Returns number, kind, bucket, decode rows, chunks, their tokens, ms, expected ms, late."""
    return [
        step.number,
        step.kind,
        step.bucket,
        step.decode_rows,
        step.chunks,
        step.chunk_tokens,
        _ms(step.seconds),
        _ms(step.expected),
        int(step.late),
    ]


def _pages(occupancy: Occupancy) -> dict[str, Any]:
    pages = occupancy.pages
    return {
        "page_size": pages.page_size,
        "total": pages.total,
        "free": pages.free,
        "cached": pages.cached,
        "stride": pages.stride,
        "states": base64.b64encode(pages.states).decode(),
    }


def _queue(waiting: Iterable[WaitingView]) -> list[list[Any]]:
    """Returns, for each class, [class, waiting with at most each of DEADLINES left (overdue first),
    with more, without a deadline]. A class is a priority, or the preempted sequences."""
    rows: dict[str, Counter[int]] = {}
    for each in waiting:
        name = "preempted" if each.preempted else f"priority {each.level}" if each.level else "new"
        if name not in rows and len(rows) >= _MAX_LEVELS:
            name = "others"
        rows.setdefault(name, Counter())[_bin(each.left)] += 1
    bins = len(DEADLINES) + 2
    return [[name, *(counts[index] for index in range(bins))] for name, counts in rows.items()]


def _bin(left: float | None) -> int:
    if left is None:
        return len(DEADLINES) + 1
    return sum(left > limit for limit in DEADLINES)


def _bounds(distribution: Distribution) -> list[float]:
    return list(distribution.bounds[:-1])


def _s(seconds: float) -> float:
    return round(seconds, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
