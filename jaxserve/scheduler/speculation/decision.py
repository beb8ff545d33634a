"""Whether the next step verifies drafts, and how many positions it computes of each sequence.

A step of plain decoding and the verify buckets compete by expected tokens per second. Both come
from what was measured: step times (`LearnedTimes`), and how often drafts of this kind were right
(`Proposal.survival`, and what became of those that were planned).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jaxserve.scheduler.budget import MAX_SLOWDOWN
from jaxserve.scheduler.learned_times import LearnedTimes

_MARGIN = 0.03
"""Share of the tokens per second that a step must yield more than decode rows. A rule, not
measured."""

_KEPT = 0.98
"""What is left of older observations after each step with proposals: the last 50 count."""

_BELIEVED = 16.0
"""Drafts. The weight of the expectation itself beside what became of it."""


class Decision:
    """Chooses the positions per row of the next step."""

    def __init__(
        self, times: LearnedTimes, positions: Collection[int], *, max_itl: float = math.inf
    ):
        """Returns a decision that has seen no drafts yet.

        Args:
          positions: of the verify buckets.
          max_itl: seconds. A step with drafts takes no longer, for rows whose drafts are wrong wait
            as long for one token; or no longer than a step with a chunk may, see `MAX_SLOWDOWN`.
        """
        self._times, self._positions = times, sorted(set(positions))
        self._max_itl = max_itl
        self._expected = self._accepted = 0.0
        """Drafts that rows should have had accepted, and had."""

    @property
    def trust(self) -> float:
        """Accepted drafts per expected one, lately."""
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
        """Returns the positions of the rows with drafts; 1: a step that verifies nothing new, for
        rows that follow others in flight; 0: decode rows for those that do not follow.

        Args:
          rows: sequences that decode.
          context: tokens in the cache of all of them together.
          survivals: of each sequence with drafts, `Proposal.survival`.
          unsettled: sequences that cannot decode plainly before a commit.
          coming: of each sequence that computes one position now, behind which it has drafts. They
            are worth as much, but none of them is accepted yet.
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
        """Returns how many accepted drafts a step of so many rows must expect at least, to be worth
        more than decode rows; infinite if no bucket could yield as many."""
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
        """Returns whether a step of single positions comes before one with chunks, in which
        `unsettled` of the rows would get no token."""
        seconds = self._times.of_verify(rows, 1, context)
        if seconds is None:
            return False
        plain = self._times.of_decode(rows, context)
        return seconds - plain < unsettled / rows * plain

    def _settling(self, rows: int, context: int, drafted: int) -> float:
        """Returns the seconds that a step with drafts costs later, once: the rows with drafts miss
        a step, or all take a verify step in place of a decode step."""
        plain = self._times.of_decode(rows, context)
        seconds = self._times.of_verify(rows, 1, context)
        missed = drafted / rows * plain
        return missed if seconds is None else min(missed, max(seconds - plain, 0.0))

    def observe(self, accepted: int) -> None:
        """Report a row's accepted drafts."""
        self._accepted += accepted
