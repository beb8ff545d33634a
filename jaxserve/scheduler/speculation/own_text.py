"""What is known of a sequence's next tokens from texts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduler.speculation.hit_rates import OwnRate
from jaxserve.scheduler.speculation.other_texts import Follower
from jaxserve.scheduler.speculation.suffix_index import SuffixIndex


class OwnText:
    """Kept with a sequence, from when drafts are first looked up for it."""

    __slots__ = ("index", "others", "rate")

    def __init__(
        self, tokens: Sequence[int], others: Sequence[Follower] = (), *, least: int, most: int
    ):
        """`tokens`: prompt and output, to which the scheduler appends; see `SuffixIndex`. `others`:
        where it is in other texts."""
        self.index = SuffixIndex(tokens, least=least, most=most)
        self.rate = OwnRate()
        self.others = others
