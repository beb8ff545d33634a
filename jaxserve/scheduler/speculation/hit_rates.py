"""Learns how often a token equals the one that followed an earlier match, by match length."""

from __future__ import annotations

_CLASSES = (3, 4, 6, 9, 16, 32)
"""The shortest match of each class, in tokens. Shorter matches belong to the first class."""

_PRIOR = (0.3, 0.4, 0.55, 0.75, 0.9, 0.95)
"""Initial hit rate of each class: guesses, weighted as `_BELIEVED` tokens."""

_BELIEVED, _REMEMBERED = 16, 512
"""Weight of the prior, and the averaging window, in tokens per class."""

_OWN_BELIEVED, _OWN_REMEMBERED = 8, 64
"""The same for the difference between one sequence and all others."""

_LEAST, _MOST = 0.02, 0.995

_CLASS_OF = tuple(
    max(sum(least <= length for least in _CLASSES) - 1, 0) for length in range(_CLASSES[-1] + 1)
)


class OwnRate:
    """The difference of a sequence's hit rate from the rate of all sequences. Mutable."""

    __slots__ = ("more", "seen")

    def __init__(self) -> None:
        self.more, self.seen = 0.0, _OWN_BELIEVED


class HitRates:
    """Hit rates per class of match length, plus an offset per sequence (`OwnRate`).

    They learn from every new token, drafted or not, so no trial drafts are needed to notice that
    drafting pays again. Older tokens count less.
    """

    def __init__(self) -> None:
        self._rates = list(_PRIOR)
        self._seen = [_BELIEVED] * len(_PRIOR)

    def count(self, length: int, own: OwnRate, *, hit: bool) -> None:
        """Records whether a token equals the one that followed a match of `length` tokens."""
        place = _CLASS_OF[length if length < _CLASSES[-1] else _CLASSES[-1]]
        error = hit - self._rates[place]
        seen = self._seen[place] = min(self._seen[place] + 1, _REMEMBERED)
        own.seen = min(own.seen + 1, _OWN_REMEMBERED)
        own.more += (error - own.more) / own.seen
        self._rates[place] += error / seen

    def survival(self, length: int, own: OwnRate, count: int) -> list[float]:
        """Returns, for up to `count` next tokens, the probability that this token and all tokens
        before it equal those that followed a match of `length` tokens. The list ends where the
        probability falls below `_LEAST`."""
        rates, more, left = self._rates, own.more, 1.0
        found: list[float] = []
        for longer in range(length, length + count):
            place = _CLASS_OF[longer if longer < _CLASSES[-1] else _CLASSES[-1]]
            left *= min(max(rates[place] + more, _LEAST), _MOST)
            if left < _LEAST:
                break
            found.append(left)
        return found
