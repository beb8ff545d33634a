"""Applies the results of steps to sequences, and recovers from failed steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from jaxserve.api import FinishReason, TokenEvent
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import results
from jaxserve.scheduler.guided import Guided
from jaxserve.scheduler.live_sequences import LiveSequences
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import VerifyRows

log = logging.getLogger(__name__)


class Commits(LiveSequences):
    """The part of the scheduler that applies results from the device."""

    _verify: VerifyRows | None = None

    def __init__(self, *args: Any, **options: Any):
        """Takes the arguments of `LiveSequences`."""
        super().__init__(*args, **options)
        self._guided = Guided(self._live)
        self._uncommitted: list[TokenEvent] = []
        """Events of the commit in progress. If it raises, `fail` returns them."""
        self.num_steps = 0
        self.num_prompt_tokens = 0
        """Prompt tokens that committed steps computed or found cached; each counts once."""

    def commit(self, plan: StepPlan, sampled: Iterable[Sampled | None]) -> list[TokenEvent]:
        """Applies the results of a plan's rows, in order. Returns the events of live sequences."""
        events = self._uncommitted
        self.num_steps += 1
        live, now = self._live, self._clock()
        pairs = zip(plan.rows, sampled, strict=True)
        for row, result in (
            self._verify.unrolled(pairs, live) if plan.verify and self._verify else pairs
        ):
            seq = live.get(row.seq_id)
            if seq is None:
                continue  # it ended after this plan was made
            if row.scored is not None and result is not None:
                seq.prompt_logprobs += result.prompt_logprobs
            if row.tokens:
                self.num_prompt_tokens += seq.count_prompt_tokens(row.start + len(row.tokens))
            if not row.samples:
                continue
            assert result is not None, "a row that samples has a result"
            if result.token is None:
                events.append(self._spoiled(seq))
                continue
            token, tokens = result.token, seq.tokens
            tokens.append(token)
            seq.in_flight -= 1
            if len(tokens) < seq.plain_until and token not in seq.stops:
                events.append(TokenEvent(seq.request_id, token))
            else:
                events.append(self._take(seq, result, now))
        self._guided.ask(self._verify and self._verify.guess)
        self._kv_cache.committed()
        self._uncommitted = []
        return events

    def _spoiled(self, seq: Sequence) -> TokenEvent:
        """Ends a sequence whose logits are NaN. Its keys and values may be NaN too, so this also
        empties the prefix cache."""
        log.error(
            "request %s ends with an error: after %d tokens its logits are not numbers (NaN or"
            " infinite); the prefix cache is emptied",
            seq.request_id,
            len(seq.tokens),
        )
        seq.in_flight -= 1
        self._end(seq)
        self._kv_cache.forget()
        return TokenEvent(seq.request_id, None, FinishReason.ERROR)

    def _take(self, seq: Sequence, result: Sampled, now: float) -> TokenEvent:
        """Applies a token that may end the sequence, fill a page, or carry logprobs."""
        event = results.event_of(seq, result, now)
        self._kv_cache.publish(seq)
        if event.finish is not None:
            self._end(seq)
        elif seq.guide is not None:
            self._guided.advance(seq, seq.guide, seq.tokens[-1])
        elif not seq.wants_logprobs:
            seq.plain_until = min(seq.limit, self._kv_cache.next_full_page(seq))
        return event

    def _end(self, seq: Sequence) -> None:
        if self._verify is not None and self._verify.ended is not None:
            self._verify.ended(seq)
        super()._end(seq)

    def await_guides(self, timeout: float) -> list[TokenEvent]:
        """Waits at most `timeout` seconds for the masks of structured output.

        Sequences with a mask join the next step. Sequences whose grammar failed end.
        """
        failed = self._guided.wait(timeout)
        for seq, _ in failed:
            self._end(seq)
        return [TokenEvent(seq.request_id, None, finish) for seq, finish in failed]

    def fail(self, plans: Iterable[StepPlan] | None = None) -> list[TokenEvent]:
        """Recovers from a failed step. Returns the events of sequences that end with an error.

        The device has lost its state. Sequences with rows in `plans` end. Other running sequences
        return to the queue and are recomputed. The prefix cache is emptied. Events of a commit that
        raised come first.

        Args:
          plans: the plans that will not be committed; all other plans were. None: end all
            sequences.
        """
        rows = (row.seq_id for plan in plans or () for row in plan.rows)
        ids = list(self._live) if plans is None else dict.fromkeys(rows)
        failed = [self._live[seq_id] for seq_id in ids if seq_id in self._live]
        for seq in failed:
            self._end(seq)
        for seq in list(self._running.values()):
            assert not seq.in_flight, "a plan with its sample neither committed nor failed"
            self._vacate(seq)
            self._waiting.push(seq)
        self._kv_cache.failed()
        if self._verify is not None:
            self._verify.failed()
        found, self._uncommitted = self._uncommitted, []
        return found + [TokenEvent(seq.request_id, None, FinishReason.ERROR) for seq in failed]
