"""The loop of the engine thread: plan a step, launch it, finish the previous one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxserve.api import (
    EngineFailed,
    FinishReason,
    Overloaded,
    Rejected,
    Request,
    TokenEvent,
    WeightChange,
    WeightsRefused,
)
from jaxserve.engine.inbox import Abort, Between, Inbox, ResetPrefixCache, Submit
from jaxserve.engine.recent_steps import RecentSteps
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import PageMoves, Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.learned_times import StepClock
from jaxserve.scheduler.transfers import MovesFailed

log = logging.getLogger(__name__)

_GUIDE_WAIT, _IDLE_GUIDE_WAIT = 0.001, 0.05
"""Seconds that planning waits for the masks of structured output: with a step in flight, and
without."""

_COPY_WAIT = 0.0002
"""Seconds between two polls of page copies to or from the host while no step runs."""

_OPEN_SHARE = 0.75
"""Share of a step's expected time in which arriving requests are queued. Then the engine thread
waits for the results alone, because steps may end earlier than expected."""

_SHORTER, _LONGER = 0.5, 1.05
"""Factors of that share after a step that had ended when this thread came to wait for it, and after
any other step. If steps are much faster than expected, such steps are one in 15, not one in two."""

_QUIET = 1.0
"""Seconds without work before `Scheduler.check` runs. The check takes milliseconds, which would
delay a lone client's next request."""

_STEP_FAILED = "a step failed; the sequences that it held end with an error"


class StepRunner[P](Protocol):
    """The methods of a runner that the engine calls."""

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]: ...
    def launch(self, plan: StepPlan) -> P: ...
    def is_done(self, pending: P) -> bool: ...
    def collect(self, pending: P) -> list[Sampled | None]: ...
    def reset(self) -> None: ...


class WeightStore(Protocol):
    """Loads weights and gives them to the runner."""

    @property
    def model(self) -> str:
        """Source of the weights that the engine serves."""
        ...

    def load(self, change: WeightChange) -> Callable[[], None]:
        """Loads other weights beside the current ones. Callable from any thread. Returns a function
        that switches to them; call it between two steps.

        Raises:
          WeightsRefused: the weights cannot be loaded or do not fit.
        """
        ...

    def sleep(self, *, drop_weights: bool) -> None:
        """Frees the device state, and also the weights if `drop_weights`. Call it between two
        steps."""
        ...

    def reload(self) -> Callable[[], None]:
        """Loads the state that `sleep` dropped. Callable from any thread. Returns a function that
        makes the engine ready to run steps; call it between two steps.

        Raises:
          WeightsRefused: the weights cannot be loaded or do not fit.
        """
        ...


class Parts[P](NamedTuple):
    """The scheduler and the runner of the engine thread, which also makes them."""

    scheduler: Scheduler
    runner: StepRunner[P]
    weights: WeightStore | None = None
    """Changes the runner's weights; None: the weights never change."""
    close: Callable[[], None] | None = None
    """Called after the last step."""


class Refused(NamedTuple):
    """The scheduler refused a request."""

    request_id: str
    error: Rejected | Overloaded


type Posted = TokenEvent | Refused | EngineFailed


class StepLoop[P]:
    """Drives a scheduler and a runner on one thread."""

    def __init__(
        self,
        parts: Parts[P],
        inbox: Inbox,
        post: Callable[[list[Posted]], None],
        metrics: Metrics,
    ):
        """`post` gets the messages of one step."""
        self.scheduler, self.runner, self.store, self._close = parts
        self._inbox = inbox
        self._post = post
        self._metrics = metrics
        self._preemptions = self._prompt_tokens = 0
        self._clock = StepClock()
        self._open_share = _OPEN_SHARE
        self.recent = RecentSteps()
        self._idle = True
        self._last_step = time.monotonic()
        self._between: deque[Between] = deque()
        self.paused = False
        """No step is planned while this is true."""
        self._arrived = False
        """Sequences stopped waiting for pages from the host in this turn."""
        self.last_gap = 0.0
        """Seconds of the last operation between two steps, with the wait for the step before it."""
        self.weights = 0
        """Version of the served weights."""

    @property
    def last_step_age(self) -> float:
        """Seconds since the last step ended; 0 while there is no work. Callable from any thread."""
        return 0.0 if self._idle else time.monotonic() - self._last_step

    def run(self) -> None:
        """Runs steps until the inbox is closed. Launches each step before it reads the results of
        the previous one."""
        scheduler = self.scheduler
        in_flight: tuple[StepPlan, P] | None = None
        while not self._inbox.closed:
            working = (scheduler.has_work or scheduler.is_moving_pages) and not self.paused
            self._idle = in_flight is None and not working and not self._between
            if self._idle:
                self._rest()
                self._last_step = time.monotonic()  # an idle engine is not stalled
            self._read_inbox()
            self._idle = False
            if self._between:
                in_flight = self._do_between(in_flight)
            began = in_flight
            in_flight = self._finish(in_flight) if self.paused else self._advance(in_flight)
            idle = began is in_flight is None and not self._arrived and not self.paused
            if idle and scheduler.is_moving_pages:
                self._inbox.wait(_COPY_WAIT)  # no step can run until copies have ended
            self._last_step = time.monotonic()
        if in_flight is not None:
            with contextlib.suppress(Exception):
                # Nobody needs the results, but XLA aborts a process that ends during a step.
                self.runner.collect(in_flight[1])
        if self._close is not None:
            self._close()

    def _rest(self) -> None:
        """Waits for a command. After `_QUIET` seconds it checks the scheduler's accounts once and
        drops the recent steps."""
        if not self._inbox.wait(_QUIET):
            self.recent.forget()
            _check_accounts(self.scheduler)
            self._inbox.wait()

    def _read_inbox(self) -> None:
        for command in self._inbox.take():
            match command:
                case Abort(request_id):
                    self.scheduler.abort(request_id)
                case ResetPrefixCache():
                    self.scheduler.reset_prefix_cache()
                case Submit(request):
                    self._add(request)
                case Between():
                    self._between.append(command)

    def _do_between(self, in_flight: tuple[StepPlan, P] | None) -> tuple[StepPlan, P] | None:
        """Runs the operations due between two steps, unless sequences must end first. Returns the
        step in flight."""
        scheduler = self.scheduler
        while self._between:
            each, error = self._between[0], None
            if each.drain and not scheduler.drained:
                if not self.paused:
                    scheduler.hold(True)
                    return in_flight
                error = WeightsRefused(
                    "the engine is paused with running sequences, which cannot end; resume it first"
                )
            began = time.perf_counter()
            in_flight = self._finish(in_flight)
            self._between.popleft()
            try:
                if error is None:
                    each.run()
            except Exception as caught:
                error = caught
            self.last_gap = time.perf_counter() - began
            scheduler.hold(False)
            each.done(error)
        self._clock.rest()
        return None

    def _finish(self, in_flight: tuple[StepPlan, P] | None) -> None:
        """Reads the results of the step in flight. No step is in flight afterwards."""
        if in_flight is None:
            return
        try:
            sampled = self._collect(*in_flight)
            self._publish(self.scheduler.commit(in_flight[0], sampled))
        except Exception:
            log.exception(_STEP_FAILED)
            self._recover([in_flight[0]])
        self._count_scheduled()

    def _add(self, request: Request) -> None:
        """Queues a request. Any failure here ends only this request."""
        try:
            self.scheduler.add(request)
        except (Rejected, Overloaded) as error:
            self._post([Refused(request.id, error)])
        except Exception:
            log.exception("request %s could not be queued; it ends with an error", request.id)
            self._publish([TokenEvent(request.id, None, FinishReason.ERROR)])

    def _advance(self, in_flight: tuple[StepPlan, P] | None) -> tuple[StepPlan, P] | None:
        """Launches one step and finishes the previous one. Returns the step now in flight."""
        scheduler, runner = self.scheduler, self.runner
        try:
            for request_id, missed in scheduler.shed():
                self._post([Refused(request_id, missed)])
                self._metrics.count_shed()
            self._publish(scheduler.await_guides(_GUIDE_WAIT if in_flight else _IDLE_GUIDE_WAIT))
            plan = scheduler.plan()
        except Exception:
            log.exception("planning a step failed; all requests end with an error")
            self._recover(None)
            return None
        launched: tuple[StepPlan, P] | None = None
        lost: list[StepPlan] | None = None
        try:
            self._move_pages()
            if plan is not None:
                launched = (plan, runner.launch(plan))
            self._arrived = scheduler.poll_host()
            self._move_pages()
        except MovesFailed:
            log.exception(
                "moving pages to or from the host failed; running sequences are recomputed"
            )
            self._finish(in_flight)
            self._finish(launched)
            self._recover([])
            return None
        except Exception:
            log.exception(_STEP_FAILED)
            lost = [] if plan is None else [plan]
        if in_flight is None:
            self._clock.rest()
        else:
            self._queue_arrivals(in_flight[0])
            try:
                sampled = self._collect(*in_flight)
                self._publish(scheduler.commit(in_flight[0], sampled))
            except Exception:  # the step launched after it used its state, so it failed too
                log.exception(_STEP_FAILED)
                lost = [in_flight[0], *([] if plan is None else [plan])]
        self._count_scheduled()
        if lost is not None:
            self._recover(lost)
            return None
        return launched

    def _move_pages(self) -> None:
        """Launches moves of pages. Before a step it launches the moves that the plan needs. After
        the launch of a step it launches loads that have arrived and stores ahead of eviction. So
        this thread's work for the tier overlaps with steps on the device."""
        host = self.scheduler.host
        moves = None if host is None else host.take()
        if host is not None and moves is not None:
            host.launched(self.runner.move_pages(moves))

    def _queue_arrivals(self, plan: StepPlan) -> None:
        """Queues the requests that arrive while the device computes a step. Hashing a long prompt
        takes half a millisecond. After the step's results, that would delay the next launch, and
        the device would idle."""
        expected, began = self.scheduler.expected_seconds(plan), self._clock.ended
        if expected is None or began is None:
            return
        until = began + self._open_share * expected
        while (left := until - time.perf_counter()) > 0 and self._inbox.wait(left):
            requests = list(self._inbox.take_requests())
            for request in requests:
                self._add(request)
            if not requests:
                return  # other commands wait for the end of the step

    def _collect(self, plan: StepPlan, pending: P) -> list[Sampled | None]:
        seen = not self.runner.is_done(pending)
        sampled = self.runner.collect(pending)
        took = self._clock.took(time.perf_counter(), seen=seen)
        factor = _LONGER if seen else _SHORTER
        self._open_share = min(factor * self._open_share, _OPEN_SHARE)
        self.recent.add(plan, took, self._metrics.last_step)
        correction = None if took is None else self.scheduler.learn(plan, took)
        if correction is not None:
            self._metrics.observe_correction(*correction)
        return sampled

    def _recover(self, lost: list[StepPlan] | None) -> None:
        """Ends the requests of lost steps (None: all) and resets the device state."""
        self._publish(self.scheduler.fail(lost))
        self.runner.reset()

    def _count_scheduled(self) -> None:
        drafts = self.scheduler.drafts
        if drafts is not None and drafts.rows:
            self._metrics.count_drafts(*drafts.take())
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
            version = self.weights
            self._post([each._replace(weights=version) if version else each for each in events])

    def _count_end(self, event: TokenEvent) -> None:
        if event.finish is FinishReason.ERROR:
            self._metrics.count_error()
        elif event.token is not None:
            self._metrics.observe_preemptions(event.preemptions)


def _check_accounts(scheduler: Scheduler) -> None:
    try:
        scheduler.check()
    except AssertionError as error:
        log.critical("the scheduler's accounts are inconsistent, please report this: %s", error)
