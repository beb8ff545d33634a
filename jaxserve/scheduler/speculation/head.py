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


_UNSEEN = 8192
"""Plans without a row that says anything, after which a quarter of what was learned is forgotten:
other text may suit the head better. A rule: trying again takes some 40 steps."""


class HeadDrafts:
    """A proposer whose drafts the host never sees. It learns how often they are accepted."""

    def __init__(self, *, drafts: int):
        """`drafts`: of a row at most."""
        self._rates = [_PRIOR] * drafts
        self._seen = [_BELIEVED] * drafts
        self._unseen = 0
        """Plans since the last row that said something."""

    def __call__(self, sequences: Iterable[Sequence]) -> Mapping[int, Proposal]:
        """See `Proposer`. A sequence without drafts on the device computes one position, after
        which it has some: it is worth as much as if it had them."""
        self._unseen += 1
        if self._unseen >= _UNSEEN:
            self._forget()
        survival = tuple(itertools.accumulate(self._rates, operator.mul))
        found = Proposal(1 + len(survival), None, survival)
        first = found._replace(positions=1)
        return {seq.id: found if seq.drafts_on_device else first for seq in sequences}

    def observe(self, drafts: int, accepted: int) -> None:
        """Report a row: each draft up to the first that was rejected says something."""
        self._unseen = 0
        for place in range(min(drafts, accepted + 1)):
            seen = self._seen[place] = min(self._seen[place] + 1, _REMEMBERED)
            self._rates[place] += ((place < accepted) - self._rates[place]) / seen

    def _forget(self) -> None:
        self._unseen = 0
        self._rates = [(3 * rate + _PRIOR) / 4 for rate in self._rates]
        self._seen = [_BELIEVED] * len(self._seen)
