"""Proposes the drafts of a head. Each verify step leaves them on the device for the next step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Proposal

_PRIOR = 0.6
"""Initial acceptance rate of each draft: a guess, weighted as `_BELIEVED` rows."""

_BELIEVED, _REMEMBERED = 16, 512
"""Weight of the prior, and the averaging window, in rows."""


_UNSEEN = 8192
"""Plans without an observed row after which the rates move a quarter of the way to the prior: other
text may suit the head better. Chosen, not measured: a retry takes some 40 steps."""


class HeadDrafts:
    """A proposer that learns acceptance rates. The drafts themselves stay on the device."""

    def __init__(self, *, drafts: int):
        """`drafts`: the most drafts per row."""
        self._rates = [_PRIOR] * drafts
        self._seen = [_BELIEVED] * drafts
        self._unseen = 0
        """Plans since the last observed row."""

    def __call__(self, sequences: Iterable[Sequence]) -> Mapping[int, Proposal]:
        """See `Proposer`. A sequence without drafts on the device computes one position, and has
        drafts afterwards. Its proposal has the same survival as one with drafts."""
        self._unseen += 1
        if self._unseen >= _UNSEEN:
            self._forget()
        survival = tuple(itertools.accumulate(self._rates, operator.mul))
        found = Proposal(1 + len(survival), None, survival)
        first = found._replace(positions=1)
        return {seq.id: found if seq.drafts_on_device else first for seq in sequences}

    def observe(self, drafts: int, accepted: int) -> None:
        """Records a row. Only drafts up to the first rejected one are evidence."""
        self._unseen = 0
        for place in range(min(drafts, accepted + 1)):
            seen = self._seen[place] = min(self._seen[place] + 1, _REMEMBERED)
            self._rates[place] += ((place < accepted) - self._rates[place]) / seen

    def _forget(self) -> None:
        self._unseen = 0
        self._rates = [(3 * rate + _PRIOR) / 4 for rate in self._rates]
        self._seen = [_BELIEVED] * len(self._seen)
