"""Masks off the engine's thread: one worker computes those of all sequences that wait for one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.api import FinishReason, GuideError

log = logging.getLogger(__name__)

_FAILED = GuideError("the mask could not be computed", FinishReason.ERROR)


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for the client."""


class Waiting(Protocol):
    """A sequence that needs a mask."""

    @property
    def ready(self) -> bool: ...
    def finish(self, mask: bytes, error: GuideError | None) -> None:
        """The mask is known, or the sequence cannot go on."""
        ...


class Job(NamedTuple):
    sequence: Waiting
    matcher: LLMatcher
    token: int
    """What the sequence got; the mask is that of the next token."""


class MaskWorker:
    """A thread that takes all jobs at hand, so that many sequences share one parallel call."""

    def __init__(self, words: int, threads: int):
        """`words`: 4-byte words of a mask."""
        self._words = words
        self._executor = LLExecutor(threads)
        self._jobs: deque[Job] = deque()
        self._wake = threading.Event()
        self._done = threading.Condition()
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def wait_for(self, sequence: Waiting, timeout: float) -> bool:
        """Until the sequence's mask is there, at most `timeout` seconds; whether it is."""
        with self._done:
            return self._done.wait_for(lambda: sequence.ready, timeout)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
            try:
                self._compute(jobs)
            except BaseException:  # a panic of llguidance's is no Exception
                log.exception("masks of structured output could not be computed")
                for job in jobs:
                    job.sequence.finish(b"", _FAILED)
            with self._done:
                self._done.notify_all()

    def _compute(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        self._executor.consume_token_par([(job.matcher, job.token) for job in jobs])
        masks = np.empty((len(jobs), self._words), np.int32)
        targets = [(job.matcher, row) for row, job in enumerate(jobs)]
        fill_next_token_bitmask_par(self._executor, targets, masks)
        for mask, job in zip(masks, jobs, strict=True):
            error = GuideError(job.matcher.get_error()) if job.matcher.is_error() else None
            job.sequence.finish(mask.tobytes(), error)
