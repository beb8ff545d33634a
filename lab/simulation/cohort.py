"""Sequences that decode together and nothing else: their steps are counted, not planned.

The simulator's way through long answers. What a step changes is what `Scheduler.plan` and
`Scheduler.commit` would change, one step ahead: a page taken here, a full page published there.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.plan import Row, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.sequence import Sequence


def decodes_alone(seq: Sequence, row: Row, page_size: int) -> bool:
    """Whether this row is all that is in flight of a sequence without anything special."""
    return (
        row.seq_id == seq.id
        and not row.tokens
        and seq.in_flight == 1
        and seq.computed == len(seq.tokens)
        and seq.guide is None
        and not seq.wants_logprobs
        and seq.published == len(seq.tokens) // page_size
    )


def cohort_of(scheduler: Scheduler, in_flight: StepPlan, token: int) -> Cohort | None:
    """All that run, if they decode, `in_flight` is all of it, and nobody can be admitted.

    Then the steps to come are equal until one of them ends, a request comes or leaves, or pages
    are short. `token` is what they sample. Reads the scheduler's own state: no product code does.
    """
    running, waiting = scheduler._running, scheduler._waiting.first()
    may_admit = (
        waiting is not None
        and waiting is not scheduler._blocked
        and scheduler._kv_cache.num_free_slots > 0
    )
    if len(in_flight.rows) != len(running) or may_admit:
        return None
    for seq, row in zip(running.values(), in_flight.rows, strict=True):
        if not decodes_alone(seq, row, scheduler._page_size):
            return None
    return Cohort(running.values(), scheduler._kv_cache, token)


class Cohort:
    """All running sequences, each of which has one decode row in flight."""

    def __init__(self, sequences: Collection[Sequence], kv_cache: KVCacheManager, token: int):
        """`token` is what all of them sample."""
        self.sequences = sequences
        self.steps = 0
        """That were planned; as many were committed."""
        self.context = sum(seq.computed for seq in sequences)
        """Tokens in the cache of the rows of the next step."""
        self._kv_cache, self._token = kv_cache, token
        self._started = {seq.id: len(seq.tokens) for seq in sequences}
        self._rows, self._size = len(sequences), kv_cache.page_size
        self._by_phase: list[list[Sequence]] = [[] for _ in range(self._size)]
        """Those that need a page in step 0 (and `page_size`, ...), 1, and so on."""
        for seq in sequences:
            self._by_phase[-seq.computed % self._size].append(seq)

    @property
    def max_steps(self) -> int:
        """Before one of them has all its tokens in flight."""
        return min(seq.limit - 1 - seq.computed for seq in self.sequences)

    def step(self) -> bool:
        """Plan one step and commit the one before; False, and no change, if pages are short."""
        if growing := self._by_phase[self.steps % self._size]:
            if self._kv_cache.lacks_pages(growing):
                return False
            for seq in growing:
                _ = list(self._kv_cache.append_pages(seq))
        self.steps += 1
        self.context += self._rows
        for seq in self._by_phase[self.steps % self._size]:
            self._catch_up(seq)
            self._kv_cache.publish(seq)
            seq.plain_until = min(seq.limit, self._kv_cache.next_full_page(seq))
        return True

    def end(self) -> StepPlan:
        """Leave every sequence as the last step left it; the plan that is in flight then."""
        for seq in self.sequences:
            self._catch_up(seq)
        rows = (Row(seq.id, seq.slot, seq.computed - 1, (), True) for seq in self.sequences)
        return StepPlan(rows=tuple(rows))

    def _catch_up(self, seq: Sequence) -> None:
        length = self._started[seq.id] + self.steps
        seq.tokens += [self._token] * (length - len(seq.tokens))
        seq.computed = length
