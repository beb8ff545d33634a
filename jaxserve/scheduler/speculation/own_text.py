"""The text lookup state of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduler.speculation.hit_rates import OwnRate
from jaxserve.scheduler.speculation.other_texts import Follower
from jaxserve.scheduler.speculation.suffix_index import SuffixIndex


class OwnText:
    """A sequence's index, hit rate and followers. Created at its first lookup."""

    __slots__ = ("index", "others", "rate")

    def __init__(
        self, tokens: Sequence[int], others: Sequence[Follower] = (), *, least: int, most: int
    ):
        """Creates an index of no tokens yet.

        Args:
          tokens: prompt and output. The scheduler appends to it.
          others: followers of the sequence in other texts.
          least, most: see `SuffixIndex`.
        """
        self.index = SuffixIndex(tokens, least=least, most=most)
        self.rate = OwnRate()
        self.others = others
