"""The loop of the engine thread: plan a step, launch it, finish the one before."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxserve.api import EngineFailed, FinishReason, Overloaded, Rejected, Request, TokenEvent
from jaxserve.engine.inbox import Abort, Inbox, ResetPrefixCache, Submit
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.learned_times import StepClock

log = logging.getLogger(__name__)

_GUIDE_WAIT, _IDLE_GUIDE_WAIT = 0.001, 0.05
"""Seconds that the next plan waits for masks of structured output, while a step is computed and
while nothing is."""

_QUIET = 1.0
"""Seconds without a request before the accounts are gone through: that takes milliseconds, for
which the next request of a lone client would wait, and its answers' last events before it."""

_STEP_FAILED = "a step failed; the sequences that it held end with an error"


class StepRunner[P](Protocol):
    """What the engine needs of a runner."""

    def launch(self, plan: StepPlan) -> P: ...
    def collect(self, pending: P) -> list[Sampled | None]: ...
    def reset(self) -> None: ...


class Parts[P](NamedTuple):
    """What the engine thread drives, made on that thread."""

    scheduler: Scheduler
    runner: StepRunner[P]


class Refused(NamedTuple):
    """The scheduler did not take a request."""

    request_id: str
    error: Rejected | Overloaded


type Posted = TokenEvent | Refused | EngineFailed


class StepLoop[P]:
    """Drives a scheduler and a runner; runs on one thread from its first line to its last."""

    def __init__(
        self,
        parts: Parts[P],
        inbox: Inbox,
        post: Callable[[list[Posted]], None],
        metrics: Metrics,
    ):
        """`post` is called with what the requests of one step get."""
        self.scheduler, self._runner = parts
        self._inbox = inbox
        self._post = post
        self._metrics = metrics
        self._preemptions = self._prompt_tokens = 0
        self._clock = StepClock()
        self._idle = True
        self._last_step = time.monotonic()

    @property
    def last_step_age(self) -> float:
        """Seconds since the last step ended, or there was nothing to do: 0 while there is not. For
        any thread."""
        return 0.0 if self._idle else time.monotonic() - self._last_step

    def run(self) -> None:
        """Launch the next step before reading the one in flight, for as long as there is work;
        returns when the inbox is closed."""
        scheduler = self.scheduler
        in_flight: tuple[StepPlan, P] | None = None
        while not self._inbox.closed:
            self._idle = in_flight is None and not scheduler.has_work
            if self._idle:
                self._rest()
                self._last_step = time.monotonic()  # to have nothing to do is not to be stuck
            self._read_inbox()
            self._idle = False
            in_flight = self._advance(in_flight)
            self._last_step = time.monotonic()
        if in_flight is not None:
            with contextlib.suppress(Exception):
                # Nobody waits for it, but XLA aborts a process that ends in the middle of a step.
                self._runner.collect(in_flight[1])

    def _rest(self) -> None:
        """Wait until there is something to do; once nothing has come for a while, look whether
        every page and slot is accounted for."""
        if not self._inbox.wait(_QUIET):
            _check_accounts(self.scheduler)
            self._inbox.wait()

    def _read_inbox(self) -> None:
        for order in self._inbox.take():
            match order:
                case Abort(request_id):
                    self.scheduler.abort(request_id)
                case ResetPrefixCache():
                    self.scheduler.reset_prefix_cache()
                case Submit(request):
                    self._add(request)

    def _add(self, request: Request) -> None:
        """What one request holds must not end the others: whatever fails here is its own error."""
        try:
            self.scheduler.add(request)
        except (Rejected, Overloaded) as error:
            self._post([Refused(request.id, error)])
        except Exception:
            log.exception("request %s could not be queued; it ends with an error", request.id)
            self._publish([TokenEvent(request.id, None, FinishReason.ERROR)])

    def _advance(self, in_flight: tuple[StepPlan, P] | None) -> tuple[StepPlan, P] | None:
        """Launch one step, finish the one before; returns the step now in flight."""
        scheduler, runner = self.scheduler, self._runner
        try:
            for request_id, missed in scheduler.shed():
                self._post([Refused(request_id, missed)])
                self._metrics.count_shed()
            self._publish(scheduler.await_guides(_GUIDE_WAIT if in_flight else _IDLE_GUIDE_WAIT))
            plan = scheduler.plan()
        except Exception:
            log.exception("a plan could not be made; all requests end with an error")
            self._recover(None)
            return None
        launched, lost = None, list[StepPlan]()
        if plan is not None:
            try:
                launched = (plan, runner.launch(plan))
            except Exception:
                log.exception(_STEP_FAILED)
                lost = [plan]
        if in_flight is None:
            self._clock.rest()
        else:
            try:
                sampled = self._collect(*in_flight)
                self._publish(scheduler.commit(in_flight[0], sampled))
            except Exception:  # what was launched after it works on what it left behind
                log.exception(_STEP_FAILED)
                lost = [in_flight[0], *([] if plan is None else [plan])]
        self._count_preemptions()
        if lost:
            self._recover(lost)
            return None
        return launched

    def _collect(self, plan: StepPlan, pending: P) -> list[Sampled | None]:
        began = time.perf_counter()
        sampled = self._runner.collect(pending)
        took = self._clock.took(began, time.perf_counter())
        correction = None if took is None else self.scheduler.learn(plan, took)
        if correction is not None:
            self._metrics.observe_correction(*correction)
        return sampled

    def _recover(self, lost: list[StepPlan] | None) -> None:
        """End the requests of lost steps (None: all), and start again with a fresh device state."""
        self._publish(self.scheduler.fail(lost))
        self._runner.reset()

    def _count_preemptions(self) -> None:
        while self._preemptions < self.scheduler.num_preemptions:
            self._preemptions += 1
            self._metrics.count_preemption()

    def _publish(self, events: list[TokenEvent]) -> None:
        generated = len(events)
        for event in events:
            if event.start is not None:
                self._metrics.observe_start(event.start)
            if event.finish is not None:
                generated -= event.token is None
                self._count_end(event)
        read = self.scheduler.num_prompt_tokens
        if generated or read > self._prompt_tokens:
            self._metrics.count_tokens(read - self._prompt_tokens, generated)
            self._prompt_tokens = read
        if events:
            self._post(list(events))

    def _count_end(self, event: TokenEvent) -> None:
        if event.finish is FinishReason.ERROR:
            self._metrics.count_error()
        elif event.token is not None:
            self._metrics.observe_preemptions(event.preemptions)


def _check_accounts(scheduler: Scheduler) -> None:
    try:
        scheduler.check()
    except AssertionError as error:
        log.critical("the scheduler's accounts are wrong, please report this: %s", error)
