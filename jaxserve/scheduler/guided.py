"""Structured output in the scheduler: sequences that wait for the mask of their next token."""

from __future__ import annotations

import logging
import time
from collections.abc import Container

from jaxserve.api import FinishReason, GuideState
from jaxserve.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class Guided:
    """The sequences whose next mask may not be ready."""

    def __init__(self, live: Container[int]):
        """`live`: the ids of sequences that have not ended."""
        self._live = live
        self._waiting: list[tuple[Sequence, GuideState]] = []

    def advance(self, seq: Sequence, guide: GuideState, token: int) -> None:
        """Report a sampled token. Another process computes the sequence's next mask."""
        guide.advance(token)
        self._waiting.append((seq, guide))

    def wait(self, timeout: float) -> list[tuple[Sequence, FinishReason]]:
        """Wait at most `timeout` seconds for all masks. Returns the sequences whose grammar failed,
        with their finish reasons."""
        deadline = time.monotonic() + timeout
        failed: list[tuple[Sequence, FinishReason]] = []
        waiting, self._waiting = self._waiting, []
        for seq, guide in waiting:
            if seq.id not in self._live:
                continue
            if not guide.wait(max(0.0, deadline - time.monotonic())):
                self._waiting.append((seq, guide))
            elif (error := guide.error) is not None:
                log.warning("%s: its grammar cannot be followed: %s", seq.request_id, error.text)
                failed.append((seq, error.finish))
        return failed
