"""Structured output in the scheduler: sequences that wait for the mask of their next token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping

from jaxserve.api import FinishReason, GuideState
from jaxserve.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

type Drafted = tuple[tuple[int, ...], tuple[float, ...]]
"""Drafts of a sequence's next tokens; for each, the probability that it and all drafts before it
are accepted."""
type Guess = Callable[[list[Sequence]], tuple[int, Mapping[int, Drafted]]]
"""Returns the largest useful number of drafts, and drafts by sequence id for some sequences."""


class Guided:
    """Sequences whose next mask may not be ready."""

    def __init__(self, live: Container[int]):
        """`live`: the ids of sequences that have not ended."""
        self._live = live
        self._waiting: list[tuple[Sequence, GuideState]] = []
        self._new: dict[int, tuple[Sequence, GuideState, list[int]]] = {}

    def advance(self, seq: Sequence, guide: GuideState, token: int) -> None:
        """Reports a sampled token. A sequence may report several before `ask`."""
        known = self._new.get(seq.id)
        if known is None:
            self._new[seq.id] = (seq, guide, [token])
        else:
            known[2].append(token)

    def ask(self, guess: Guess | None) -> None:
        """Requests the next masks of sequences with new tokens from another process. With `guess`,
        it also requests the masks after drafts."""
        new, self._new = self._new, {}
        asked = [each for key, each in new.items() if key in self._live]
        if not asked:
            return
        most, guesses = 0, {}
        if guess is not None:
            most, guesses = guess([seq for seq, _, _ in asked if not seq.in_flight])
        for seq, guide, tokens in asked:
            drafts, seq.guessed = guesses.get(seq.id, ((), ()))
            guide.advance(*tokens, drafts=drafts, most=0 if seq.in_flight else most)
            self._waiting.append((seq, guide))

    def wait(self, timeout: float) -> list[tuple[Sequence, FinishReason]]:
        """Waits at most `timeout` seconds for all masks. Returns the sequences whose grammar
        failed, with their finish reasons."""
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
