"""Counts how much of a client's prediction occurs in an answer (OpenAI's `prediction`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

_AGAIN = 3
"""After a difference, this many predicted tokens must occur in a row before they count again."""


class PredictedTokens:
    """Matches an answer with its prediction. The count depends only on those two, not on whether
    the server used the prediction."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._next = 0
        self._lost = False
        self._latest: deque[int] = deque(maxlen=_AGAIN)
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Positions after each n-gram, increasing. Built on first use."""
        self.accepted = 0
        """Predicted tokens that occur in the answer, in order."""

    @property
    def rejected(self) -> int:
        return len(self._tokens) - self.accepted

    def add(self, token: int) -> None:
        """Reports the answer's next token."""
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
        """Continues after the next position in the prediction that follows the latest tokens."""
        if not self._places:
            tokens = self._tokens
            for end in range(_AGAIN, len(tokens) + 1):
                self._places.setdefault(tuple(tokens[end - _AGAIN : end]), []).append(end)
        places = self._places.get(tuple(self._latest), [])
        first = bisect_left(places, self._next + _AGAIN)
        if first < len(places):
            self._next, self._lost = places[first], False
            self.accepted += _AGAIN
