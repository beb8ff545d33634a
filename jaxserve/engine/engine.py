"""The engine: one thread that owns the device, one step ahead of what it has read.

The event loop's side submits and aborts through an inbox; the thread answers with one message per
step. Nothing else is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, Protocol

from jaxserve.api import (
    EngineFailed,
    EngineLimits,
    EngineStatus,
    Overloaded,
    Rejected,
    Request,
    TokenEvent,
)
from jaxserve.engine.mailbox import Mailbox
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.learned_times import StepClock

log = logging.getLogger(__name__)

_GUIDE_WAIT, _IDLE_GUIDE_WAIT = 0.001, 0.05
"""Seconds that the next plan waits for masks of structured output, while a step is computed and
while nothing is."""

_SWITCH_INTERVAL = 0.001
"""Seconds after which a thread gives the interpreter's lock to another one that waits for it."""

_QUIET = 1.0
"""Seconds without a request before the accounts are gone through: that takes milliseconds, for
which the next request of a lone client would wait, and its answers' last events before it."""

_STEP_FAILED = "a step failed; the sequences that it held end with an error"

type Progress = Callable[[str, float], None]
"""Called with the phase of the start-up and the fraction of it that is done."""


class StepRunner[P](Protocol):
    """What the engine needs of a runner."""

    def launch(self, plan: StepPlan) -> P: ...
    def collect(self, pending: P) -> list[Sampled | None]: ...
    def reset(self) -> None: ...


class Parts[P](NamedTuple):
    """What the engine thread drives, made on that thread."""

    scheduler: Scheduler
    runner: StepRunner[P]


class _Submit(NamedTuple):
    request: Request


class _Abort(NamedTuple):
    request_id: str


class _ResetPrefixCache(NamedTuple):
    pass


class _Refused(NamedTuple):
    """The scheduler did not take a request."""

    request_id: str
    error: Rejected | Overloaded


type _Order = _Submit | _Abort | _ResetPrefixCache
type _Posted = TokenEvent | _Refused | EngineFailed
type _Message = _Posted | Overloaded


class AsyncEngine[P]:
    """Implements `api.Engine` over a scheduler and a runner."""

    def __init__(
        self,
        *,
        build: Callable[[Progress], Parts[P]],
        limits: EngineLimits,
        metrics: Metrics,
    ):
        """`build` runs on the engine thread: it loads weights and compiles the buckets."""
        self._build = build
        self._limits = limits
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Mailbox[_Message]] = {}
        self._inbox: deque[_Order] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready: asyncio.Future[None] | None = None
        self._died = asyncio.Event()
        self._phase, self._progress = "starting", 0.0
        self._error: str | None = None
        self._parts: Parts[P] | None = None
        self._last_progress = time.monotonic()
        self._idle = True
        self._preemptions = 0
        self._steps = StepClock()

    # The event loop's side.

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    async def start(self) -> None:
        """Start the thread and wait until it serves; raises what `build` raised."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def failure(self) -> str:
        """Wait until the thread that served has died; returns why. `start` has returned before."""
        await self._died.wait()
        return self._error or ""

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = True

    async def stop(self) -> None:
        """End the thread after the step in flight; streams still open end with an error."""
        self._stopping = self._draining = True
        self._wake.set()
        # Not join(): the loop goes on delivering meanwhile. A start-up cannot be interrupted;
        # its thread ends with the process.
        while self._phase == "serving" and self._thread.is_alive():
            await asyncio.sleep(0.01)
        for mailbox in self._streams.values():
            mailbox.put(Overloaded("the server is shutting down", retry_after=30.0))

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def status(self) -> EngineStatus:
        scheduler = self._parts.scheduler if self._parts else None
        phase = "draining" if self._draining and self._phase == "serving" else self._phase
        return EngineStatus(
            ready=phase == "serving",
            phase=phase,
            progress=self._progress,
            running=scheduler.num_running if scheduler else 0,
            waiting=(scheduler.num_waiting if scheduler else 0) + len(self._inbox),
            free_pages=scheduler.pages.num_free if scheduler else 0,
            total_pages=scheduler.pages.num_total if scheduler else 0,
            last_step_age=0.0 if self._idle else time.monotonic() - self._last_progress,
            error=self._error,
        )

    async def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """See `api.Engine.generate`."""
        self._check_accepting()
        if request.id in self._streams:
            raise Rejected(f"a request with the id {request.id!r} is not finished")
        assert self._loop is not None
        mailbox = self._streams[request.id] = Mailbox[_Message](self._loop)
        self._send(_Submit(request))
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
                self._send(_Abort(request.id))

    def _check_accepting(self) -> None:
        if self._error is not None:
            raise EngineFailed(self._error)
        if self._phase != "serving":
            raise Overloaded(f"the server is starting ({self._phase})", retry_after=5.0)
        if self._draining:
            raise Overloaded("the server is shutting down", retry_after=30.0)

    def reset_prefix_cache(self) -> None:
        """See `api.Engine.reset_prefix_cache`: before the next step is planned."""
        self._send(_ResetPrefixCache())

    def _send(self, message: _Order) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _deliver(self, messages: list[_Posted]) -> None:
        """Hand one step's messages to their streams; a stream that was closed drops its own."""
        for message in messages:
            if isinstance(message, EngineFailed):
                for mailbox in self._streams.values():
                    mailbox.put(message)
            elif (mailbox := self._streams.get(message.request_id)) is not None:
                mailbox.put(message)

    # The thread's side.

    def _post(self, messages: list[_Posted]) -> None:
        self._call(self._deliver, messages)

    def _call[*Args](self, function: Callable[[*Args], object], *args: *Args) -> None:
        """On the event loop, after what was called there before."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening
            self._loop.call_soon_threadsafe(function, *args)

    def _settle_ready(self, error: BaseException | None) -> None:
        ready, loop = self._ready, self._loop
        assert ready is not None
        assert loop is not None

        def settle() -> None:
            if ready.done():
                return
            if error is None:
                ready.set_result(None)
            else:
                ready.set_exception(error)

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    def _run(self) -> None:
        # An event loop that writes to many streams is busy for long. With Python's own 5 ms it
        # would keep this thread from going on for as long as a step takes, after each of its waits.
        sys.setswitchinterval(_SWITCH_INTERVAL)
        try:
            self._parts = self._build(self._report)
            self._report("serving", 1.0)
            self._settle_ready(None)
            self._serve(self._parts)
        except BaseException as error:
            self._phase, self._error = "failed", f"{type(error).__name__}: {error}"
            if self._ready is not None and not self._ready.done():
                self._settle_ready(error)
            else:
                log.exception("the engine thread died")
                self._post([EngineFailed(self._error)])
                self._call(self._died.set)

    def _report(self, phase: str, progress: float) -> None:
        self._phase, self._progress = phase, progress
        self._last_progress = time.monotonic()

    def _serve(self, parts: Parts[P]) -> None:
        """Launch the next step before reading the one in flight, for as long as there is work."""
        scheduler = parts.scheduler
        in_flight: tuple[StepPlan, P] | None = None
        while not self._stopping:
            self._idle = in_flight is None and not scheduler.has_work
            if self._idle:
                self._rest(scheduler)
            self._wake.clear()
            self._read_inbox(scheduler)
            self._idle = False
            in_flight = self._advance(parts, in_flight)
            self._last_progress = time.monotonic()
        if in_flight is not None:
            with contextlib.suppress(Exception):
                # Nobody waits for it, but XLA aborts a process that ends in the middle of a step.
                parts.runner.collect(in_flight[1])

    def _rest(self, scheduler: Scheduler) -> None:
        """Wait until there is something to do; once nothing has come for a while, look whether
        every page and slot is accounted for."""
        if not self._wake.wait(_QUIET):
            _check_accounts(scheduler)
            self._wake.wait()

    def _advance(
        self, parts: Parts[P], in_flight: tuple[StepPlan, P] | None
    ) -> tuple[StepPlan, P] | None:
        """Launch one step, finish the one before; returns the step now in flight."""
        scheduler, runner = parts
        try:
            for request_id, missed in scheduler.shed():
                self._post([_Refused(request_id, missed)])
                self._metrics.count_shed()
            self._end_failed(scheduler.await_guides(_GUIDE_WAIT if in_flight else _IDLE_GUIDE_WAIT))
            plan = scheduler.plan()
        except Exception:
            log.exception("a plan could not be made; all requests end with an error")
            self._recover(parts, None)
            return None
        launched, lost = None, list[StepPlan]()
        if plan is not None:
            try:
                launched = (plan, runner.launch(plan))
            except Exception:
                log.exception(_STEP_FAILED)
                lost = [plan]
        if in_flight is None:
            self._steps.rest()
        else:
            try:
                sampled = self._collect(parts, *in_flight)
                self._publish(scheduler.commit(in_flight[0], sampled))
            except Exception:  # what was launched after it works on what it left behind
                log.exception(_STEP_FAILED)
                lost = [in_flight[0], *([] if plan is None else [plan])]
        self._count_preemptions(scheduler)
        if lost:
            self._recover(parts, lost)
            return None
        return launched

    def _collect(self, parts: Parts[P], plan: StepPlan, pending: P) -> list[Sampled | None]:
        began = time.perf_counter()
        sampled = parts.runner.collect(pending)
        took = self._steps.took(began, time.perf_counter())
        correction = None if took is None else parts.scheduler.learn(plan, took)
        if correction is not None:
            self._metrics.observe_correction(*correction)
        return sampled

    def _recover(self, parts: Parts[P], lost: list[StepPlan] | None) -> None:
        """End the requests of lost steps (None: all), and start again with a fresh device state."""
        self._end_failed(parts.scheduler.fail(lost))
        parts.runner.reset()

    def _end_failed(self, failed: list[TokenEvent]) -> None:
        for _ in failed:
            self._metrics.count_error()
        self._publish(failed)

    def _count_preemptions(self, scheduler: Scheduler) -> None:
        while self._preemptions < scheduler.num_preemptions:
            self._preemptions += 1
            self._metrics.count_preemption()

    def _publish(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.start is not None:
                self._metrics.observe_start(event.start)
            if event.finish is not None and event.token is not None:
                self._metrics.observe_preemptions(event.preemptions)
        if events:
            self._post(list(events))

    def _read_inbox(self, scheduler: Scheduler) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case _Abort(request_id):
                    scheduler.abort(request_id)
                case _ResetPrefixCache():
                    scheduler.reset_prefix_cache()
                case _Submit(request):
                    try:
                        scheduler.add(request)
                    except (Rejected, Overloaded) as error:
                        self._post([_Refused(request.id, error)])


def _up_to_end(messages: list[_Message]) -> tuple[list[TokenEvent], Exception | None]:
    """The events up to the last one of their sequence, and what ended it instead of one."""
    events: list[TokenEvent] = []
    for message in messages:
        if not isinstance(message, TokenEvent):
            return events, message.error if isinstance(message, _Refused) else message
        events.append(message)
        if message.finish is not None:
            break
    return events, None


def _check_accounts(scheduler: Scheduler) -> None:
    try:
        scheduler.check()
    except AssertionError as error:
        log.critical("the scheduler's accounts are wrong, please report this: %s", error)
