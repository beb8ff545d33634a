"""Decides whether the next step verifies drafts, and how many positions per sequence it computes.

It compares the expected tokens per second of a plain decode step and of each verify bucket. The
estimate uses measured step times (`LearnedTimes`) and measured acceptance of drafts
(`Proposal.survival`, corrected by the acceptance of earlier planned drafts).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jaxserve.scheduler.budget import MAX_SLOWDOWN
from jaxserve.scheduler.learned_times import LearnedTimes

_MARGIN = 0.03
"""A verify step must yield this share more tokens per second than a decode step. Chosen, not
measured."""

_KEPT = 0.98
"""Decay of older observations per step with proposals: roughly the last 50 steps count."""

_BELIEVED = 16.0
"""Weight of the prior that drafts are accepted as often as expected, in drafts."""


class Decision:
    """Chooses the positions per row of the next step."""

    def __init__(
        self, times: LearnedTimes, positions: Collection[int], *, max_itl: float = math.inf
    ):
        """Creates a decision without observations.

        Args:
          positions: positions per row of each verify bucket.
          max_itl: time limit of a verify step in seconds, because a row whose drafts are all wrong
            waits that long for one token. A step within `MAX_SLOWDOWN` is allowed, too.
        """
        self._times, self._positions = times, sorted(set(positions))
        self._max_itl = max_itl
        self._expected = self._accepted = 0.0
        """Expected and actual numbers of accepted drafts, decayed."""

    @property
    def trust(self) -> float:
        """Recent ratio of accepted drafts to expected ones."""
        return (self._accepted + _BELIEVED) / (self._expected + _BELIEVED)

    def choose(
        self,
        rows: int,
        context: int,
        survivals: Sequence[Sequence[float]],
        *,
        unsettled: int,
        coming: Sequence[Sequence[float]] = (),
    ) -> int:
        """Returns the positions per row of the next step.

        1 is a verify step without new drafts; it includes sequences with drafts in flight. 0 is a
        decode step; it leaves those sequences out.

        Args:
          rows: number of decoding sequences.
          context: total tokens of these sequences in the cache.
          survivals: `Proposal.survival` of each sequence with drafts.
          unsettled: number of sequences that cannot join a decode step before a commit.
          coming: `Proposal.survival` of each sequence that gets its first drafts from this step.
            They count as much, but this step accepts none of them.
        """
        self._expected *= _KEPT
        self._accepted *= _KEPT
        plain = rows - unsettled
        needed = plain / self._times.of_decode(plain, context) if plain else 0.0
        best, expected, after = 0, 0.0, 0.0
        if unsettled:
            seconds = self._times.of_verify(rows, 1, context)
            if seconds is not None and rows / seconds > needed:
                best, needed = 1, rows / seconds
        elif survivals or coming:
            after = self._settling(rows, context, len(survivals) + len(coming))
        needed *= 1 + _MARGIN
        longest = max(self._max_itl, MAX_SLOWDOWN * self._times.of_decode(rows, context))
        for positions in self._positions if survivals or coming else ():
            seconds = self._times.of_verify(rows, positions, context)
            if seconds is None or seconds > longest:
                continue
            drafts = sum(sum(survival[: positions - 1]) for survival in survivals)
            later = sum(sum(survival[: positions - 1]) for survival in coming)
            rate = (rows + self.trust * (drafts + later)) / (seconds + after)
            if rate > needed:
                best, needed, expected = positions, rate, drafts
        self._expected += expected
        return best

    def least_drafts(self, rows: int, context: int) -> float:
        """Returns the least number of expected accepted drafts with which a verify step of `rows`
        rows pays; infinity if no bucket can pay."""
        plain, least = self._times.of_decode(rows, context), math.inf
        for positions in self._positions:
            seconds = self._times.of_verify(rows, positions, context)
            if seconds is None:
                continue
            needed = rows * ((1 + _MARGIN) * seconds / plain - 1)
            drafted = math.ceil(max(needed, 0.0) / max(positions - 1, 1))
            after = self._settling(rows, context, drafted)
            needed = rows * ((1 + _MARGIN) * (seconds + after) / plain - 1)
            if needed < min(least, rows * (positions - 1)):
                least = needed
        return least

    def settles(self, rows: int, context: int, unsettled: int) -> bool:
        """Returns whether a verify step with one position per row should precede a step with
        chunks, in which `unsettled` of the rows would get no token."""
        seconds = self._times.of_verify(rows, 1, context)
        if seconds is None:
            return False
        plain = self._times.of_decode(rows, context)
        return seconds - plain < unsettled / rows * plain

    def _settling(self, rows: int, context: int, drafted: int) -> float:
        """Returns the seconds that a step with drafts costs afterwards: either the rows with drafts
        miss a step, or all rows take a verify step in place of a decode step."""
        plain = self._times.of_decode(rows, context)
        seconds = self._times.of_verify(rows, 1, context)
        missed = drafted / rows * plain
        return missed if seconds is None else min(missed, max(seconds - plain, 0.0))

    def observe(self, accepted: int) -> None:
        """Records a row's number of accepted drafts."""
        self._accepted += accepted
