"""Drafts of a head on the device, which every verify step leaves for the next one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Proposal

_PRIOR = 0.6
"""What is believed of each draft before any is seen: a guess, which counts as `_BELIEVED` rows."""

_BELIEVED, _REMEMBERED = 16, 512
"""Rows: the weight of the prior, and how many are averaged. So it forgets."""


class HeadDrafts:
    """A proposer whose drafts the host never sees. It learns how often they are accepted."""

    def __init__(self, *, drafts: int):
        """`drafts`: of a row at most."""
        self._rates = [_PRIOR] * drafts
        self._seen = [_BELIEVED] * drafts

    def __call__(self, sequences: Iterable[Sequence]) -> Mapping[int, Proposal]:
        """See `Proposer`. A sequence without drafts on the device computes one position, after
        which it has some: it is worth as much as if it had them."""
        survival = tuple(itertools.accumulate(self._rates, operator.mul))
        found = Proposal(1 + len(survival), None, survival)
        first = found._replace(positions=1)
        return {seq.id: found if seq.drafts_on_device else first for seq in sequences}

    def observe(self, drafts: int, accepted: int) -> None:
        """Report a row: each draft up to the first that was rejected says something."""
        for place in range(min(drafts, accepted + 1)):
            seen = self._seen[place] = min(self._seen[place] + 1, _REMEMBERED)
            self._rates[place] += ((place < accepted) - self._rates[place]) / seen
