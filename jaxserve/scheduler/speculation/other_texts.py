"""Finds the newest tokens of a sequence in other texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from jaxserve.scheduler.speculation.hit_rates import HitRates, OwnRate
from jaxserve.scheduler.speculation.suffix_index import CANDIDATES

_BETWEEN = -1
"""Separates two texts. No token equals it, so no match crosses it."""

_LATE = 16
"""With more new tokens than this, only the last one is looked up."""


def owner_of(*parts: bytes) -> int:
    """Returns the number that identifies the owner of texts: 63 bits of a hash."""
    state = sha256()
    for part in parts:
        state.update(b"%d:" % len(part))
        state.update(part)
    return int.from_bytes(state.digest()[:8]) >> 1


class OtherTexts:
    """The newest texts of all owners in one ring, with hash chains over their n-grams.

    A search finds only texts of the same owner: the owner's number is part of an n-gram's hash and
    is compared at each match. The ring allocates all its memory at once, 28 bytes per token. New
    tokens overwrite the oldest ones. Adding a token and searching take constant time.
    """

    def __init__(self, tokens: int, *, least: int, most: int):
        """Creates a ring without texts.

        Args:
          tokens: capacity, rounded up to a power of two.
          least: the shortest match, in tokens.
          most: a search stops at a match of this many tokens.
        """
        size = 1 << max(tokens - 1, 1).bit_length()
        self._size, self._mask = size, size - 1
        self._least, self._most = least, most
        self._text = array("i", [_BETWEEN]) * size
        self._owners = array("q", [0]) * size
        self._before = array("q", [0]) * size
        """By position: the position after the previous n-gram with the same hash; 0: none."""
        self._newest = array("q", [0]) * size
        """By hash of an n-gram: the position after its newest occurrence; 0: none."""
        self.end = 0
        """Number of positions written so far. The ring holds the last ones."""

    def add(self, tokens: Sequence[int], owner: int) -> None:
        """Adds a text, or its end if it is longer than the ring."""
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
        """Returns the token at a position; negative after a text's end and if the position was
        overwritten."""
        there = self.end - self._size <= position < self.end
        return self._text[position & self._mask] if there else _BETWEEN

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """Returns up to `count` tokens from a position on. Stops at the end of the text."""
        found: list[int] = []
        while len(found) < count and (token := self.token(position + len(found))) >= 0:
            found.append(token)
        return tuple(found)

    def find(self, tokens: Sequence[int], end: int, owner: int) -> tuple[int, int]:
        """Finds the longest match of the tokens that end at `end` in the owner's texts.

        Returns the position after the match and its length; 0 and 0 if there is none.
        """
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
    """Follows a match of a sequence in other texts, and searches again when they differ."""

    __slots__ = ("_next", "_rate", "_rates", "_texts", "done", "length", "owner")

    def __init__(self, texts: OtherTexts, owner: int, rates: HitRates, done: int, length: int = 0):
        """Creates a follower that has read a sequence's first `done` tokens.

        Args:
          length: length of an assumed match that ends at position 0 of the texts; 0: no match.
        """
        self._texts, self.owner, self._rates = texts, owner, rates
        self._rate = OwnRate()
        self._next, self.length, self.done = 0, length, done

    def read(self, tokens: Sequence[int]) -> None:
        """Follows a sequence's new tokens and learns from them."""
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
        """Returns up to `count` tokens that followed the match, and for each the probability that
        it and all tokens before it are right."""
        if not self.length:
            return (), []
        found = self._texts.following(self._next, count)
        return found, self._rates.survival(self.length, self._rate, len(found))
