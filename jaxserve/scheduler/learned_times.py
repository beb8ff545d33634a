"""Step times measured at start-up, corrected by the steps that have run since.

Start-up measures few steps of each kind, on an idle GPU and without the other work of serving. Its
table was off by up to 16 % in one bucket and 2 % in the next. The choice of chunk sizes depends on
smaller differences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.plan import StepPlan
from jaxserve.step_times import StepTimes

_BELIEVED, _STEPS = 8, 64
"""Weight of the table's time, in steps; and the number of steps that a correction averages."""

_ODD = 0.25
"""Largest deviation of one step that counts, as a share of the expected time. So one delayed step
changes little, and a GPU that has slowed down is believed after some steps."""

_BUSY, _ENOUGH = 0.8, 32
"""If a bucket's learned time is less than that share of the table's, after so many steps, the GPU
was busy at start-up."""

_LEAST, _MOST = 0.2, 1.5
"""Limits of a bucket's learned time, as shares of the table's. If the GPU was busy at start-up, the
table's times are several times too long; they are never much too short."""


class Correction(NamedTuple):
    """The difference between a bucket's learned time and the table's."""

    kind: str
    """`decode`, `mixed` or `verify`."""
    bucket: str
    """Rows, tokens, or rows and positions."""
    seconds: float


class LearnedTimes:
    """`StepTimes` with a correction for each bucket of steps that have decode rows.

    The error of the table hardly depends on the rows in a bucket, so corrections are added, not
    multiplied. A bucket without steps keeps the table's time. If that is too low, the bucket is
    chosen and then corrected. If it is too high, the bucket might never be chosen. So if the GPU
    was busy at start-up, a bucket without steps has the nearest known bucket's share of the table's
    time. Other corrections do not affect other buckets.
    """

    def __init__(self, table: StepTimes):
        self._table = table
        self._decode, self._mixed = _Buckets(table.decode), _Buckets(table.mixed)
        self._verify = {shape: _Buckets({1: time.seconds}) for shape, time in table.verify.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The mixed buckets, in tokens."""
        return tuple(self._table.mixed)

    @property
    def prefill_rate(self) -> float:
        """See `StepTimes.prefill_rate`."""
        return max(size / self._mixed.of(size) for size in self.sizes)

    def of_decode(self, rows: int, context: int) -> float:
        """See `StepTimes.of_decode`."""
        return self._decode.of(rows) + context * self._table.decode_context

    def of_mixed(
        self, tokens: int, rows: int = 0, context: int = 0, pairs: int = 0, depth: int = 0
    ) -> float:
        """See `StepTimes.of_mixed`. Without decode rows it returns the table's time."""
        if not rows:
            return self._table.of_mixed(tokens, rows, context, pairs, depth)
        return self._mixed.of(tokens) + self._table.beyond_bucket(rows, context, pairs, depth)

    def of_verify(self, rows: int, positions: int, context: int) -> float | None:
        """Returns the seconds of a verify step; None if no bucket is large enough.

        Args:
          positions: positions of the row with the most.
          context: tokens of context of all rows together.
        """
        shape = self._table.verify_shape(rows, positions)
        if shape is None:
            return None
        return self._verify[shape].of(1) + context * self._table.verify[shape].per_context

    def learn(self, plan: StepPlan, seconds: float) -> Correction | None:
        """Learns from a step that took `seconds`. Returns the new correction. Returns None for a
        step without decode rows, and for a verify step in a bucket without a time."""
        name = ""
        if plan.verify:
            if not self._verify:
                return None
            shape = self._table.shape_of(plan)
            kind, buckets, size = "verify", self._verify[shape], 1
            name = "{}x{}".format(*shape)
            expected = self._table.of(plan) + buckets.correction(size)
        elif plan.decode_only:
            kind, buckets, size = "decode", self._decode, len(plan.rows)
            expected = self.of_decode(size, sum([row.start for row in plan.rows]))
        elif all(row.tokens for row in plan.rows):
            return None
        else:
            kind, buckets, size = "mixed", self._mixed, plan.num_tokens
            expected = self._table.of(plan) + buckets.correction(size)
        odd = _ODD * expected
        bucket = buckets.learn(size, min(max(seconds - expected, -odd), odd))
        return Correction(kind, name or str(bucket), buckets.correction(size))


class StepClock:
    """Measures step times in a thread that launches each step before it waits for the previous
    one."""

    def __init__(self) -> None:
        self._ended: float | None = None
        """When the last step ended; None if the thread did not see it."""

    @property
    def ended(self) -> float | None:
        """When the last step ended, by `time.perf_counter`; None if the thread did not see it."""
        return self._ended

    def took(self, now: float, *, seen: bool) -> float | None:
        """Reports that a step's results were read at `now`. Returns the seconds that the step took.

        Args:
          seen: the step still ran when the thread began to wait for it. Otherwise it ended at an
            unknown earlier time, and the device may have waited for the next launch.

        Returns:
          None if the thread did not see the end of this step, or of the one before it.
        """
        before = self._ended
        self._ended = now if seen else None
        return None if before is None or self._ended is None else now - before

    def rest(self) -> None:
        """Reports that no step is in flight."""
        self._ended = None


class _Buckets:
    """The times of one kind of step."""

    def __init__(self, table: Mapping[int, float]):
        self._sizes, self._table = list(table), list(table.values())
        self._times = list(self._table)
        self._steps = [_BELIEVED] * len(table)

    def of(self, size: int) -> float:
        """Returns the seconds of the smallest bucket that holds `size`, as in `StepTimes`."""
        return self._time(self._index(size))

    def correction(self, size: int) -> float:
        index = self._index(size)
        return self._time(index) - self._table[index]

    def learn(self, size: int, error: float) -> int:
        """Corrects the bucket of `size` by an observed `error`. Returns the size of the bucket."""
        index = self._index(size)
        before = self._time(index)
        self._steps[index] = min(self._steps[index] + 1, _STEPS)
        table, learned = self._table[index], before + error / self._steps[index]
        self._times[index] = min(max(learned, table * _LEAST), table * _MOST)
        return self._sizes[index]

    def _time(self, index: int) -> float:
        """The time of a bucket. Without steps: the table's, or that of an idle GPU."""
        if self._steps[index] > _BELIEVED:
            return self._times[index]
        known = [other for other, steps in enumerate(self._steps) if steps >= _BELIEVED + _ENOUGH]
        if not known:
            return self._table[index]
        nearest = min(known, key=lambda other: abs(other - index))
        share = self._times[nearest] / self._table[nearest]
        return self._table[index] * (share if share < _BUSY else 1.0)

    def _index(self, size: int) -> int:
        return min(bisect_left(self._sizes, size), len(self._sizes) - 1)
