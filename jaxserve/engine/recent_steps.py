"""The most recent steps, for people who watch. The engine thread adds them, other threads read."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.metrics.metrics import StepSize
from jaxserve.plan import StepPlan
from jaxserve.views import StepView

_KEPT = 64
"""Steps to keep: more than a fast GPU runs between two polls, few enough that plans stay small.
Decode steps of 256 rows take 3 MB; references to the tokens of chunks of 8,192 take 4 MB more."""


class _Finished(NamedTuple):
    number: int
    plan: StepPlan
    seconds: float | None
    size: StepSize


class RecentSteps:
    """A ring of finished steps. One thread adds steps; any thread may read.

    Adding only stores references. The reader computes the views.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._ring: deque[_Finished] = deque(maxlen=_KEPT)

    def add(self, plan: StepPlan, seconds: float | None, size: StepSize) -> None:
        """Adds a step that took `seconds` (None: unknown) in a bucket of this size."""
        self._ring.append(_Finished(next(self._numbers), plan, seconds, size))

    def forget(self) -> None:
        """Drops all steps, when the engine is idle. Step numbers continue."""
        self._ring.clear()

    def since(self, number: int, expected: Callable[[StepPlan], float | None]) -> list[StepView]:
        """Returns the kept steps after step `number`. `expected` predicts a plan's seconds."""
        kept = self._ring.copy()  # atomic; iterating would race with the adding thread
        return [_view(step, expected) for step in kept if step.number > number]


def _view(step: _Finished, expected: Callable[[StepPlan], float | None]) -> StepView:
    plan = step.plan
    chunks = 0 if plan.kind != "mixed" else sum(bool(row.tokens) for row in plan.rows)
    decode_rows = len(plan.rows) - chunks
    return StepView(
        number=step.number,
        kind=plan.kind,
        bucket=step.size.bucket or plan.num_tokens,
        decode_rows=decode_rows,
        chunks=chunks,
        chunk_tokens=plan.num_tokens - decode_rows,
        seconds=step.seconds,
        expected=expected(plan),
        late=step.size.late,
    )
