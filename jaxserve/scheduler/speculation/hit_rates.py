"""How often the text goes on as it did at an earlier occurrence, by the length of that."""

from __future__ import annotations

_CLASSES = (3, 4, 6, 9, 16, 32)
"""The shortest occurrence of each class, in tokens; a shorter one belongs to the first."""

_PRIOR = (0.3, 0.4, 0.55, 0.75, 0.9, 0.95)
"""What is believed of each class before anything is seen: guesses, which count as `_BELIEVED`
tokens."""

_BELIEVED, _REMEMBERED = 16, 512
"""Tokens of a class: the weight of the prior, and how many are averaged. So it forgets."""

_OWN_BELIEVED, _OWN_REMEMBERED = 8, 64
"""As above, of how much a sequence differs from all others."""

_LEAST, _MOST = 0.02, 0.995

_CLASS_OF = tuple(
    max(sum(least <= length for least in _CLASSES) - 1, 0) for length in range(_CLASSES[-1] + 1)
)


class OwnRate:
    """How much more often than others a sequence goes on as before. Mutable."""

    __slots__ = ("more", "seen")

    def __init__(self) -> None:
        self.more, self.seen = 0.0, _OWN_BELIEVED


class HitRates:
    """Learned from every token that comes, drafted or not: so nothing must be tried to learn that
    it would pay again. Averages decay, and what a sequence adds is its own difference."""

    def __init__(self) -> None:
        self._rates = list(_PRIOR)
        self._seen = [_BELIEVED] * len(_PRIOR)

    def count(self, length: int, own: OwnRate, *, hit: bool) -> None:
        """Report whether a token is the one that followed an occurrence of `length` tokens."""
        place = _CLASS_OF[length if length < _CLASSES[-1] else _CLASSES[-1]]
        error = hit - self._rates[place]
        seen = self._seen[place] = min(self._seen[place] + 1, _REMEMBERED)
        own.seen = min(own.seen + 1, _OWN_REMEMBERED)
        own.more += (error - own.more) / own.seen
        self._rates[place] += error / seen

    def survival(self, length: int, own: OwnRate, count: int) -> list[float]:
        """Returns for each of the next `count` tokens the probability that it and all before it go
        on as after an occurrence of `length` tokens. It ends where that is below `_LEAST`."""
        rates, more, left = self._rates, own.more, 1.0
        found: list[float] = []
        for longer in range(length, length + count):
            place = _CLASS_OF[longer if longer < _CLASSES[-1] else _CLASSES[-1]]
            left *= min(max(rates[place] + more, _LEAST), _MOST)
            if left < _LEAST:
                break
            found.append(left)
        return found
