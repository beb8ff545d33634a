"""Drafts the tokens that followed an earlier occurrence of a sequence's newest tokens.

It searches the sequence's own text, the output that its client predicts (`Request.predicted`), and,
if enabled, earlier outputs of the same tenant. It never searches another tenant's texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.hit_rates import HitRates
from jaxserve.scheduler.speculation.other_texts import Follower, OtherTexts, owner_of
from jaxserve.scheduler.speculation.own_text import OwnText
from jaxserve.scheduler.verify import Proposal

INDEXED_PER_STEP = 2048
"""Tokens of prompts that a step may index: about 0.5 ms of the host's time. Until a prompt is
indexed its sequence gets no drafts."""

_WORTH = 0.05
"""The least expected number of accepted drafts of a proposal. With fewer, drafts in flight would
only delay the next ones."""


_EXPECTED = 32
"""Assumed match length, in tokens, at the beginning of a predicted output."""


class Lookup:
    """A proposer without weights. It finds the longest earlier occurrence of the newest tokens and
    drafts the tokens that followed it."""

    def __init__(self, *, drafts: int, least: int = 3, most: int = 32, shared: int = 0):
        """Creates a proposer of at most `drafts` drafts per row.

        Args:
          least, most: length of a match in tokens, see `SuffixIndex`.
          shared: output tokens that are kept for later requests of the same tenant, see
            `OtherTexts`; 0: none.
        """
        self._drafts = drafts
        self._least, self._most = least, most
        self._rates, self._predicted, self._shared = HitRates(), HitRates(), HitRates()
        self._outputs = OtherTexts(shared, least=least, most=most) if shared else None

    def __call__(self, sequences: Iterable[Sequence]) -> Mapping[int, Proposal]:
        """See `Proposer`. Constant time per new token."""
        found: dict[int, Proposal] = {}
        budget = INDEXED_PER_STEP
        for seq in sequences:
            own = seq.own_text
            if own is None:
                own = seq.own_text = OwnText(
                    seq.tokens, self._followers(seq), least=self._least, most=self._most
                )
            budget -= self._read(own, seq.tokens, budget)
            proposal = None
            if own.index.length and own.index.done == len(seq.tokens):
                proposal = self._proposal(seq, own)
            for other in own.others:
                other.read(seq.tokens)
                if other.length:
                    proposal = _better(proposal, self._from_other(seq, other))
            if proposal is not None:
                found[seq.id] = proposal
        return found

    def ended(self, seq: Sequence) -> None:
        """Keeps the output of a finished sequence, if outputs are shared."""
        if self._outputs is not None:
            self._outputs.add(seq.tokens[seq.num_prompt :], _owner(seq))

    def _followers(self, seq: Sequence) -> tuple[Follower, ...]:
        found: list[Follower] = []
        if seq.predicted:
            text = OtherTexts(len(seq.predicted) + 1, least=self._least, most=self._most)
            text.add(seq.predicted, 0)
            found.append(Follower(text, 0, self._predicted, seq.num_prompt, _EXPECTED))
        if self._outputs is not None:
            known = len(seq.tokens) - 1
            found.append(Follower(self._outputs, _owner(seq), self._shared, known))
        return tuple(found)

    def _from_other(self, seq: Sequence, other: Follower) -> Proposal | None:
        """Like `_proposal`, from another text."""
        flying = seq.in_flight + seq.drafts_in_flight
        drafts, survival = other.drafts(flying + self._drafts)
        survival = survival[flying:]
        if sum(survival) < _WORTH:
            return None
        return Proposal(1 + len(survival), drafts[seq.in_flight :], tuple(survival))

    def _read(self, own: OwnText, tokens: Tokens[int], budget: int) -> int:
        """Indexes new tokens and learns from them. Returns how many tokens of `budget` it used."""
        index, new = own.index, len(tokens) - own.index.done
        if new > 2 * self._drafts + 2:  # the prompt, or tokens since an earlier call
            new = min(new, budget)
            index.index(new)
            return new
        for token in tokens[len(tokens) - new :] if new else ():
            if index.length:
                self._rates.count(index.length, own.rate, hit=tokens[index.next] == token)
            index.append()
        return 0

    def _proposal(self, seq: Sequence, own: OwnText) -> Proposal | None:
        """Returns the drafts that follow the tokens and drafts in flight. They can only be right if
        those in flight match the earlier text."""
        flying = seq.in_flight + seq.drafts_in_flight
        count = flying + self._drafts
        survival = self._rates.survival(own.index.length, own.rate, count)[flying:]
        if sum(survival) < _WORTH:
            return None
        drafts = tuple(own.index.following(count)[seq.in_flight :])
        return Proposal(1 + len(survival), drafts, tuple(survival))


def _better(one: Proposal | None, other: Proposal | None) -> Proposal | None:
    """Returns the proposal with more expected accepted drafts; the first if they are equal."""
    if one is None or other is None:
        return one or other
    return other if sum(other.survival) > sum(one.survival) else one


def _owner(seq: Sequence) -> int:
    """Returns the owner number. Tenants share no texts; nor do requests with separate prefixes."""
    return owner_of(seq.tenant.encode(), seq.root)
