"""The engine: one thread owns the device and runs one step ahead of the results it has read.

The event loop submits and aborts requests through an inbox. The thread answers with one batch of
messages per step. The two sides share nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from jaxserve.api import (
    EngineFailed,
    EngineLimits,
    EngineStatus,
    Overloaded,
    ReaderTooSlow,
    Rejected,
    Request,
    Running,
    TokenEvent,
    WeightChange,
    WeightsChanged,
    WeightsRefused,
    WeightState,
)
from jaxserve.engine.inbox import Abort, Between, Inbox, ResetPrefixCache, Submit
from jaxserve.engine.loop import Parts, Posted, Refused, StepLoop, WeightStore
from jaxserve.engine.mailbox import Mailbox
from jaxserve.metrics.metrics import Metrics
from jaxserve.views import Occupancy, StepView

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.001
"""Python's switch interval in seconds: how soon a busy thread yields the interpreter's lock."""
_MAX_UNREAD = 16 * 1024
"""Tokens and logprobs of one sequence that may wait for its client (about 6 MB)."""

type Progress = Callable[[str, float], None]
"""Called with the start-up phase and its progress from 0 to 1."""

type _Message = Posted | Overloaded


class AsyncEngine[P]:
    """Implements `api.Engine` over a scheduler and a runner."""

    def __init__(
        self,
        *,
        build: Callable[[Progress], Parts[P]],
        limits: EngineLimits,
        metrics: Metrics,
    ):
        """Returns an engine that is not started.

        Args:
          build: runs on the engine thread; loads weights and compiles the buckets.
          limits: limits known before start-up; the context may turn out to be shorter.
          metrics: counts steps, tokens and requests.
        """
        self._build = build
        self._limits = limits
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Mailbox[_Message]] = {}
        self._inbox = Inbox()
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready: asyncio.Future[None] | None = None
        self._died = asyncio.Event()
        self._phase, self._progress = "starting", 0.0
        self._error: str | None = None
        self._steps: StepLoop[P] | None = None
        self._operations: set[asyncio.Future[None]] = set()
        """Operations that wait for their turn between two steps."""
        self._changing = asyncio.Lock()
        self._sleeping = False

    # The event loop's side.

    @property
    def limits(self) -> EngineLimits:
        """See `api.Engine.limits`."""
        return self._limits

    async def start(self) -> None:
        """Starts the thread and waits until it serves. Raises the exceptions of `build`."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def failure(self) -> str:
        """Waits until the thread dies; returns the reason. Call it after `start` has returned."""
        await self._died.wait()
        return self._error or ""

    def drain(self) -> None:
        """Refuses new requests. Running requests continue."""
        self._draining = True

    async def stop(self) -> None:
        """Ends the thread after the step in flight. Open streams end with an error."""
        self._draining = True
        self._inbox.close()
        # Does not join the thread, because the loop must deliver messages meanwhile. A start-up
        # cannot be interrupted; its thread ends with the process.
        while self._phase == "serving" and self._thread.is_alive():
            await asyncio.sleep(0.01)
        stopping = Overloaded("the server is shutting down", retry_after=30.0)
        for mailbox in self._streams.values():
            mailbox.put(stopping)
        self._give_up_operations(stopping)

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def status(self) -> EngineStatus:
        """See `api.Engine.status`."""
        scheduler = self._steps.scheduler if self._steps else None
        phase = "draining" if self._draining and self._phase == "serving" else self._phase
        return EngineStatus(
            ready=phase == "serving",
            phase=phase,
            progress=self._progress,
            running=scheduler.num_running if scheduler else 0,
            waiting=(scheduler.num_waiting if scheduler else 0) + self._inbox.num_submitted,
            free_pages=scheduler.pages.num_free if scheduler else 0,
            total_pages=scheduler.pages.num_total if scheduler else 0,
            last_step_age=self._steps.last_step_age if self._steps else 0.0,
            error=self._error,
        )

    async def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """See `api.Engine.generate`.

        Raises:
          Rejected: a request with this id is not finished.
          Overloaded: the server is starting or shutting down.
        """
        self._check_accepting()
        if request.id in self._streams:
            raise Rejected(f"a request with the id {request.id!r} is not finished")
        assert self._loop is not None
        mailbox = self._streams[request.id] = Mailbox[_Message](self._loop, _MAX_UNREAD)
        self._inbox.send(Submit(request))
        finished = False
        try:
            while not finished:
                events, error = _up_to_end(await mailbox.take())
                finished = error is not None or events[-1].finish is not None
                if events:
                    yield events
                if error is not None:
                    raise error
        finally:
            del self._streams[request.id]
            if not finished:
                self._inbox.send(Abort(request.id))

    def _check_accepting(self) -> None:
        if self._error is not None:
            raise EngineFailed(self._error)
        if self._phase != "serving":
            raise Overloaded(f"the server is starting ({self._phase})", retry_after=5.0)
        if self._draining:
            raise Overloaded("the server is shutting down", retry_after=30.0)

    def steps_since(self, number: int) -> list[StepView]:
        """See `api.Engine.steps_since`."""
        steps = self._steps
        return steps.recent.since(number, steps.scheduler.expected_seconds) if steps else []

    def occupancy(self, max_pages: int) -> Occupancy | None:
        """See `api.Engine.occupancy`."""
        return self._steps.scheduler.occupancy(max_pages) if self._steps else None

    def bucket_seconds(self) -> Mapping[str, Mapping[int, float]]:
        """See `api.Engine.bucket_seconds`."""
        return self._steps.scheduler.bucket_seconds() if self._steps else {}

    def reset_prefix_cache(self) -> None:
        """See `api.Engine.reset_prefix_cache`. Takes effect before the next step is planned."""
        self._inbox.send(ResetPrefixCache())

    @property
    def runner(self) -> Any:
        """The runner that `build` made. Change it only between two steps."""
        assert self._steps is not None
        return self._steps.runner

    @property
    def weights(self) -> WeightState:
        steps = self._steps
        if steps is None:
            return WeightState(0, "", paused=False, sleeping=False)
        model = steps.store.model if steps.store else ""
        return WeightState(steps.weights, model, steps.paused, self._sleeping)

    async def change_weights(self, change: WeightChange) -> WeightsChanged:
        """See `api.Engine.change_weights`."""
        store, started = self._store(), time.perf_counter()
        async with self._changing:
            use = await asyncio.to_thread(store.load, change)
            loaded = time.perf_counter() - started
            return await self._use_weights(use, change.running, loaded)

    async def use_weights(
        self, use: Callable[[], None], running: Running = Running.DRAIN
    ) -> WeightsChanged:
        """Calls `use` between two steps. It gives the runner other weights, as in
        `change_weights`."""
        async with self._changing:
            return await self._use_weights(use, running, 0.0)

    async def _use_weights(
        self, use: Callable[[], None], running: Running, load_seconds: float
    ) -> WeightsChanged:
        steps = self._steps
        assert steps is not None

        def change() -> None:
            use()
            if running is Running.RESTART:
                steps.scheduler.restart()
            steps.weights += 1
            steps.scheduler.reset_prefix_cache()

        await self._do(change, drain=running is Running.DRAIN)
        return WeightsChanged(steps.weights, load_seconds, steps.last_gap)

    async def pause(self, *, finish: bool = False) -> None:
        """See `api.Engine.pause`."""
        await self._do(functools.partial(self._set_paused, True), drain=finish)

    async def resume(self) -> None:
        """See `api.Engine.resume`. Raises WeightsRefused: the engine sleeps."""
        if self._sleeping:
            raise WeightsRefused("the engine sleeps: wake it instead")
        await self._do(functools.partial(self._set_paused, False))

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """See `api.Engine.sleep`."""
        store = self._store()
        async with self._changing:
            if self._sleeping:
                raise WeightsRefused("the engine sleeps already")

            def fall_asleep() -> None:
                steps = self._set_paused(True)
                steps.scheduler.restart()
                steps.scheduler.reset_prefix_cache()
                store.sleep(drop_weights=drop_weights)

            await self._do(fall_asleep)
            self._sleeping = True

    async def wake(self) -> None:
        """See `api.Engine.wake`."""
        store = self._store()
        async with self._changing:
            if not self._sleeping:
                raise WeightsRefused("the engine does not sleep")
            use = await asyncio.to_thread(store.reload)

            def awake() -> None:
                use()
                self._set_paused(False)

            await self._do(awake)
            self._sleeping = False

    def _store(self) -> WeightStore:
        self._check_accepting()
        assert self._steps is not None
        if self._steps.store is None:
            raise WeightsRefused("this engine's weights cannot be changed")
        return self._steps.store

    def _set_paused(self, paused: bool) -> StepLoop[P]:
        assert self._steps is not None
        self._steps.paused = paused
        return self._steps

    async def _do(self, run: Callable[[], object], *, drain: bool = False) -> None:
        """Runs a function on the engine thread between two steps. Raises its exceptions."""
        self._check_accepting()
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        self._operations.add(future)

        def end(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._inbox.send(Between(run, lambda error: self._call(end, error), drain))
        try:
            await asyncio.shield(future)
        finally:
            self._operations.discard(future)

    def _give_up_operations(self, error: Exception) -> None:
        for future in self._operations:
            if not future.done():
                future.set_exception(error)

    def _deliver(self, messages: list[Posted]) -> None:
        """Delivers the messages of one step. Drops messages of closed streams."""
        for message in messages:
            if isinstance(message, EngineFailed):
                for mailbox in self._streams.values():
                    mailbox.put(message)
                self._give_up_operations(message)
                continue
            mailbox = self._streams.get(message.request_id)
            if mailbox is not None and not mailbox.put(message, _size(message)):
                self._give_up(message.request_id, mailbox)

    def _give_up(self, request_id: str, mailbox: Mailbox[_Message]) -> None:
        """Ends a request whose client does not read. Drops its unread output."""
        text = f"{_MAX_UNREAD} tokens and logprobs waited for the client to read them"
        mailbox.replace(ReaderTooSlow(text))
        self._inbox.send(Abort(request_id))

    def _end_start(self, error: BaseException | None) -> None:
        """Makes `start` return or raise. Does nothing if `start` was cancelled."""
        assert self._ready is not None
        if self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    # The thread's side.

    def _post(self, messages: list[Posted]) -> None:
        self._call(self._deliver, messages)

    def _call[*Args](self, function: Callable[[*Args], object], *args: *Args) -> None:
        """Calls a function on the event loop, after earlier calls."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        # An event loop with many streams keeps the interpreter lock for long. Python's default of
        # 5 ms would delay this thread by a whole step after each wait.
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            parts = self._build(self._report)
            self._limits = self._limits._replace(max_model_len=parts.scheduler.max_model_len)
            self._steps = StepLoop(parts, self._inbox, self._post, self._metrics)
            self._report("serving", 1.0)
            self._call(self._end_start, None)
            self._steps.run()
        except BaseException as error:
            self._phase, self._error = "failed", f"{type(error).__name__}: {error}"
            if self._steps is None:
                self._call(self._end_start, error)
            else:
                log.exception("the engine thread died")
                self._post([EngineFailed(self._error)])
                self._call(self._died.set)

    def _report(self, phase: str, progress: float) -> None:
        self._phase, self._progress = phase, progress


def _size(message: _Message) -> int:
    """Returns the number of tokens and logprobs in a message."""
    logprobs = message.logprobs if isinstance(message, TokenEvent) else None
    return 1 if logprobs is None else 1 + len(logprobs.top)


def _up_to_end(messages: list[_Message]) -> tuple[list[TokenEvent], Exception | None]:
    """Returns the events up to the end of the sequence, and the error that ended it, if any."""
    events: list[TokenEvent] = []
    for message in messages:
        if not isinstance(message, TokenEvent):
            return events, message.error if isinstance(message, Refused) else message
        events.append(message)
        if message.finish is not None:
            break
    return events, None
