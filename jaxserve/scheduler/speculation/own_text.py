"""What a sequence's own text says of its next tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduler.speculation.hit_rates import OwnRate
from jaxserve.scheduler.speculation.suffix_index import SuffixIndex


class OwnText:
    """Kept with a sequence, from when drafts are first looked up for it."""

    __slots__ = ("index", "rate")

    def __init__(self, tokens: Sequence[int], *, least: int, most: int):
        """`tokens`: prompt and output, to which the scheduler appends; see `SuffixIndex`."""
        self.index = SuffixIndex(tokens, least=least, most=most)
        self.rate = OwnRate()
