"""Where the end of a sequence occurs in texts that are not its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from jaxserve.scheduler.speculation.hit_rates import HitRates, OwnRate
from jaxserve.scheduler.speculation.suffix_index import CANDIDATES

_BETWEEN = -1
"""Stands between two texts. No token is equal to it, so no occurrence crosses it."""

_LATE = 16
"""New tokens beyond which only the last of them is looked up."""


def owner_of(*parts: bytes) -> int:
    """Returns the number under which texts of one owner are kept apart: 63 bits of a hash."""
    state = sha256()
    for part in parts:
        state.update(b"%d:" % len(part))
        state.update(part)
    return int.from_bytes(state.digest()[:8]) >> 1


class OtherTexts:
    """The newest texts of all owners in one ring, with hash chains over their n-grams.

    An owner's texts are found by that owner only: its number is part of an n-gram's hash, and is
    compared at each place. Memory is taken at once, 28 bytes a token; the oldest tokens are
    overwritten. To add a token and to search take constant time.
    """

    def __init__(self, tokens: int, *, least: int, most: int):
        """Returns a ring without texts.

        Args:
          tokens: how many it holds, rounded up to a power of two.
          least: tokens of an occurrence at least.
          most: tokens after which a search is content.
        """
        size = 1 << max(tokens - 1, 1).bit_length()
        self._size, self._mask = size, size - 1
        self._least, self._most = least, most
        self._text = array("i", [_BETWEEN]) * size
        self._owners = array("q", [0]) * size
        self._before = array("q", [0]) * size
        """By position: that behind the occurrence before, with the same hash; 0: none."""
        self._newest = array("q", [0]) * size
        """By hash of an n-gram: the position behind its newest occurrence; 0: none."""
        self.end = 0
        """Positions that were ever written. The ring holds the last ones of them."""

    def add(self, tokens: Sequence[int], owner: int) -> None:
        """Add a text, or its end if it is longer than the ring."""
        text, owners, mask, least = self._text, self._owners, self._mask, self._least
        tokens = tokens[-(self._size - 1) :]
        for count, token in enumerate(tokens, start=1):
            position = self.end
            text[position & mask], owners[position & mask] = token, owner
            self.end = position + 1
            if count >= least:
                chain = hash((owner, *tokens[count - least : count])) & mask
                self._before[position & mask] = self._newest[chain]
                self._newest[chain] = self.end
            else:
                self._before[position & mask] = 0
        text[self.end & mask], owners[self.end & mask] = _BETWEEN, owner
        self._before[self.end & mask] = 0
        self.end += 1

    def token(self, position: int) -> int:
        """Returns the token at a position; negative behind a text's end and where it was
        overwritten."""
        there = self.end - self._size <= position < self.end
        return self._text[position & self._mask] if there else _BETWEEN

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """Returns up to `count` tokens from a position on, up to the end of the text."""
        found: list[int] = []
        while len(found) < count and (token := self.token(position + len(found))) >= 0:
            found.append(token)
        return tuple(found)

    def find(self, tokens: Sequence[int], end: int, owner: int) -> tuple[int, int]:
        """Returns the position behind the longest occurrence of the end of the first `end` tokens
        in a text of the owner, and the length of that; 0 and 0 if there is none."""
        least, mask, text = self._least, self._mask, self._text
        if end < least:
            return 0, 0
        place = self._newest[hash((owner, *tokens[end - least : end])) & mask]
        first, best, found = self.end - self._size, 0, 0
        for _ in range(CANDIDATES):
            # A text's first tokens may be gone already: their places hold newer ones.
            longest = min(self._most, end, place - max(first, 0))
            if place == 0 or longest < least:
                break
            length = 0
            while (
                length < longest and text[(place - 1 - length) & mask] == tokens[end - 1 - length]
            ):
                length += 1
            if length > best and length >= least and self._owners[(place - 1) & mask] == owner:
                best, found = length, place
                if length >= self._most:
                    break
            place = self._before[(place - 1) & mask]
        return found, best


class Follower:
    """Keeps to the occurrence of a sequence's end in other texts while both go on alike."""

    __slots__ = ("_next", "_rate", "_rates", "_texts", "done", "length", "owner")

    def __init__(self, texts: OtherTexts, owner: int, rates: HitRates, done: int, length: int = 0):
        """Returns one that has read a sequence's first `done` tokens.

        Args:
          length: of an occurrence before the first position of the texts; 0: there is none yet.
        """
        self._texts, self.owner, self._rates = texts, owner, rates
        self._rate = OwnRate()
        self._next, self.length, self.done = 0, length, done

    def read(self, tokens: Sequence[int]) -> None:
        """Follow a sequence's new tokens, and learn from them."""
        texts = self._texts
        if len(tokens) - self.done > _LATE:
            self.done = len(tokens) - 1
            self.length = 0
        for end in range(self.done + 1, len(tokens) + 1):
            hit = False
            if self.length:
                hit = texts.token(self._next) == tokens[end - 1]
                self._rates.count(self.length, self._rate, hit=hit)
            if hit:
                self._next += 1
                self.length += 1
            else:
                self._next, self.length = texts.find(tokens, end, self.owner)
        self.done = len(tokens)

    def drafts(self, count: int) -> tuple[tuple[int, ...], list[float]]:
        """Returns up to `count` tokens that followed, and for each the probability that it and all
        before it come again."""
        if not self.length:
            return (), []
        found = self._texts.following(self._next, count)
        return found, self._rates.survival(self.length, self._rate, len(found))
