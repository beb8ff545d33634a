"""Step times as the start measured them, corrected by the steps that have run since.

A start times few steps of each kind, on a card that has rested, without all that serving adds: its
table was seen 16 % off in one bucket and 2 % in the next. How large chunks are turns on less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.plan import StepPlan
from jaxserve.step_times import StepTimes

_BELIEVED, _STEPS = 8, 64
"""The table's time counts as so many steps, and a correction is the mean of about so many: of all
of a bucket as long as they are fewer."""

_ODD = 0.25
"""A step counts as at most so much longer or shorter than expected, as a share: one that something
held up changes little, and a card that has become slower is believed after some steps."""

_WAITED = 0.0002
"""Seconds: who has waited so long for a step's results has seen its end."""

_MOST = 0.5
"""A bucket is corrected by at most so much of what the table has for it."""


class Correction(NamedTuple):
    """What is added to the table's time of a bucket."""

    kind: str
    """`decode` or `mixed`."""
    bucket: int
    seconds: float


class LearnedTimes:
    """`StepTimes` of steps with decode rows, each bucket with a correction of its own.

    What the table misses is much the same however many rows a bucket has, so corrections are
    added. A bucket that has not run is believed: one that the table has as too cheap is corrected
    once it has been chosen for it, and none becomes too dear for what another one was.
    """

    def __init__(self, table: StepTimes):
        self._table = table
        self._decode, self._mixed = _Buckets(table.decode), _Buckets(table.mixed)

    def of_decode(self, rows: int, context: int) -> float:
        """See `StepTimes.of_decode`."""
        return self._decode.of(rows) + context * self._table.decode_context

    def of_mixed(
        self, tokens: int, rows: int = 0, context: int = 0, pairs: int = 0, depth: int = 0
    ) -> float:
        """See `StepTimes.of_mixed`; as in the table if there are no decode rows."""
        if not rows:
            return self._table.of_mixed(tokens, rows, context, pairs, depth)
        return self._mixed.of(tokens) + self._table.beyond_bucket(rows, context, pairs, depth)

    def learn(self, plan: StepPlan, seconds: float) -> Correction | None:
        """A step took so long; returns what changed. Chunks without decode rows change nothing."""
        if plan.decode_only:
            kind, buckets, size = "decode", self._decode, len(plan.rows)
            expected = self.of_decode(size, sum([row.start for row in plan.rows]))
        elif all(row.tokens for row in plan.rows):
            return None
        else:
            kind, buckets, size = "mixed", self._mixed, plan.num_tokens
            expected = self._table.of(plan) + buckets.correction(size)
        odd = _ODD * expected
        bucket = buckets.learn(size, min(max(seconds - expected, -odd), odd))
        return Correction(kind, bucket, buckets.correction(size))


class StepClock:
    """How long steps take, as seen by the thread that launches each before it waits for the one
    ahead of it."""

    def __init__(self) -> None:
        self._ended: float | None = None
        """When the last step ended, if that was seen."""

    def took(self, began: float, now: float) -> float | None:
        """Results were waited for from `began` to `now`; returns how long their step took.

        None where that was not seen: if the results were there already, the step had ended before;
        and if those of the step ahead of it were, the device may have waited for the launch.
        """
        before = self._ended
        self._ended = now if now - began >= _WAITED else None
        return None if before is None or self._ended is None else now - before

    def rest(self) -> None:
        """No step is in flight."""
        self._ended = None


class _Buckets:
    """Those of one kind."""

    def __init__(self, table: Mapping[int, float]):
        self._sizes, self._table = list(table), list(table.values())
        self._times = list(self._table)
        self._steps = [_BELIEVED] * len(table)

    def of(self, size: int) -> float:
        """Seconds of the smallest bucket that holds `size`, as in `StepTimes`."""
        return self._times[self._index(size)]

    def correction(self, size: int) -> float:
        index = self._index(size)
        return self._times[index] - self._table[index]

    def learn(self, size: int, error: float) -> int:
        """The bucket of `size`, which was off by `error`."""
        index = self._index(size)
        self._steps[index] = min(self._steps[index] + 1, _STEPS)
        table, learned = self._table[index], self._times[index] + error / self._steps[index]
        self._times[index] = min(max(learned, table * (1 - _MOST)), table * (1 + _MOST))
        return self._sizes[index]

    def _index(self, size: int) -> int:
        return min(bisect_left(self._sizes, size), len(self._sizes) - 1)
