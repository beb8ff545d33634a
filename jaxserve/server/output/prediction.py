"""How much of what a client predicted an answer has, for its usage (OpenAI's `prediction`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

_AGAIN = 3
"""Tokens that must come as predicted until an answer that went on otherwise is followed again."""


class PredictedTokens:
    """Follows an answer through its prediction. The count depends on the two alone, not on whether
    the server used the prediction."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._next = 0
        self._lost = False
        self._latest: deque[int] = deque(maxlen=_AGAIN)
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Behind each n-gram, increasing; made when it is needed."""
        self.accepted = 0
        """Tokens of the prediction that the answer has, in its order."""

    @property
    def rejected(self) -> int:
        return len(self._tokens) - self.accepted

    def add(self, token: int) -> None:
        """Report the answer's next token."""
        if not self._lost and self._next < len(self._tokens):
            if self._tokens[self._next] == token:
                self._next += 1
                self.accepted += 1
                return
            self._lost = True
            self._latest.clear()
        if self._lost:
            self._latest.append(token)
            self._look()

    def _look(self) -> None:
        """Go on behind the next place where the latest tokens are."""
        if not self._places:
            tokens = self._tokens
            for end in range(_AGAIN, len(tokens) + 1):
                self._places.setdefault(tuple(tokens[end - _AGAIN : end]), []).append(end)
        places = self._places.get(tuple(self._latest), [])
        first = bisect_left(places, self._next + _AGAIN)
        if first < len(places):
            self._next, self._lost = places[first], False
            self.accepted += _AGAIN
