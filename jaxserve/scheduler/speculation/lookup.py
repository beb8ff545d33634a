"""Drafts from a request's own text: what followed where its end occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.hit_rates import HitRates
from jaxserve.scheduler.speculation.own_text import OwnText
from jaxserve.scheduler.verify import Proposal

INDEXED_PER_STEP = 2048
"""Tokens of prompts that a step may index: about 0.5 ms of the host's time. Until a prompt is
indexed its sequence gets no drafts."""

_WORTH = 0.05
"""Expected accepted drafts of a row. One with fewer is no proposal: its drafts would only be in the
way of the next."""


class Lookup:
    """A proposer without weights. It takes the longest earlier occurrence of the newest tokens, and
    what followed there."""

    def __init__(self, *, drafts: int, least: int = 3, most: int = 32):
        """Returns a proposer for verify rows of at most `drafts` drafts.

        Args:
          least, most: tokens of an occurrence, see `SuffixIndex`.
        """
        self._drafts = drafts
        self._least, self._most = least, most
        self._rates = HitRates()

    def __call__(self, sequences: Iterable[Sequence]) -> Mapping[int, Proposal]:
        """See `Proposer`. Constant time per new token."""
        found: dict[int, Proposal] = {}
        budget = INDEXED_PER_STEP
        for seq in sequences:
            own = seq.own_text
            if own is None:
                own = seq.own_text = OwnText(seq.tokens, least=self._least, most=self._most)
            budget -= self._read(own, seq.tokens, budget)
            if own.index.length and own.index.done == len(seq.tokens):
                proposal = self._proposal(seq, own)
                if proposal is not None:
                    found[seq.id] = proposal
        return found

    def _read(self, own: OwnText, tokens: Tokens[int], budget: int) -> int:
        """Index new tokens, and learn from them. Returns how many were indexed at once."""
        index, new = own.index, len(tokens) - own.index.done
        if new > 2 * self._drafts + 2:  # the prompt, or what came while nobody asked
            new = min(new, budget)
            index.index(new)
            return new
        for token in tokens[len(tokens) - new :] if new else ():
            if index.length:
                self._rates.count(index.length, own.rate, hit=tokens[index.next] == token)
            index.append()
        return 0

    def _proposal(self, seq: Sequence, own: OwnText) -> Proposal | None:
        """Returns the drafts after what is in flight. Only if that goes on as expected can they be
        right."""
        flying = seq.in_flight + seq.drafts_in_flight
        count = flying + self._drafts
        survival = self._rates.survival(own.index.length, own.rate, count)[flying:]
        if sum(survival) < _WORTH:
            return None
        drafts = tuple(own.index.following(count)[seq.in_flight :])
        return Proposal(1 + len(survival), drafts, tuple(survival))
