"""Drafts without a model: right, wrong, and everything between."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Proposal

KINDS = ("oracle", "cut", "random", "adversary", "shifted", "late", "device", "unsure", "any")


_LIKELY = 0.9


class Guesses:
    """Knows what each request yields alone, and says it or not.

    Oracles are always right, the cut ones up to some draft. Adversaries are never right, and
    neither are those for the position before or after, late and shifted, but by chance. `device`:
    some rows have no drafts from the host. `unsure`: some have no proposal. `any`: each row is of
    another kind.
    """

    def __init__(
        self, outputs: Callable[[Sequence], list[int]], *, kind: str, vocab: int, seed: int
    ):
        """`outputs`: what a request yields alone."""
        self._outputs, self._kind, self._vocab = outputs, kind, vocab
        self._random = Random(seed)
        self.asked = 0

    def __call__(self, sequences: list[Sequence]) -> dict[int, Proposal]:
        proposals = {seq.id: self._proposal(seq) for seq in sequences}
        return {key: proposal for key, proposal in proposals.items() if proposal is not None}

    def _proposal(self, seq: Sequence) -> Proposal | None:
        self.asked += 1
        draw, kind = self._random, self._kind
        if kind == "any":
            kind = draw.choice(KINDS[:-1])
        tokens = [*seq.tokens[: seq.num_prompt], *self._outputs(seq)]
        first = seq.computed + 1 + (kind == "shifted") - (kind == "late")
        right = tokens[first : first + draw.choice([1, 3, 7, 14])]
        positions = draw.choice([1, 2, 3, 4, 8])
        if kind == "unsure" and draw.random() < 0.5:
            return None
        if kind == "device" and draw.random() < 0.5:
            return Proposal(positions, None)
        if kind == "random":
            right = [draw.randrange(self._vocab) for _ in right]
        elif kind in ("adversary", "cut"):
            cut = 0 if kind == "adversary" else draw.randrange(len(right) + 1)
            right = right[:cut] + [(token + 1) % self._vocab for token in right[cut:]]
        return Proposal(positions, tuple(right), (_LIKELY,) * len(right))
