"""Finds earlier occurrences of a text's end with hash chains over n-grams, as in LZ77."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

CANDIDATES = 32
"""The most earlier places of an n-gram that a search compares, from the newest on."""

_MOST_CHAINS = 1 << 16


class SuffixIndex:
    """Tracks the longest earlier occurrence of a growing text's end.

    A search compares at most `CANDIDATES` places with the same last n-gram. While new tokens equal
    those after the match, no search is needed, because no other match can become longer. So an
    append takes constant time. The index takes 4 bytes per token and 4 bytes per chain.
    """

    def __init__(self, text: Sequence[int], *, least: int, most: int):
        """Creates an index that contains no tokens yet.

        Args:
          text: token ids from 0; the owner appends to it.
          least: the shortest match, in tokens.
          most: a search stops at a match of this many tokens.
        """
        self._text = text
        self._least, self._most = least, most
        chains = 256
        while chains < len(text) and chains < _MOST_CHAINS:
            chains *= 2
        self._mask = chains - 1
        self._newest = array("i", bytes(4 * chains))
        """By hash of an n-gram: the position after its newest occurrence; 0: none."""
        self._before = array("i", bytes(4))
        """By position: the position after the previous n-gram with the same hash; 0: none."""
        self.next = 0
        """The position after the match. Its token is the first draft."""
        self.length = 0
        """Length of the match in tokens; 0: no match."""

    @property
    def done(self) -> int:
        """Number of the text's first tokens that are in the index."""
        return len(self._before) - 1

    def index(self, count: int) -> None:
        """Adds the next `count` tokens of the text, then searches for a match of the last indexed
        tokens."""
        text, least, before = self._text, self._least, self._before
        first, end = self.done, min(self.done + count, len(self._text))
        before.extend([0] * (min(end, least - 1) - first))
        first = max(first, least - 1)
        self.length = last = 0
        if end <= first:
            return
        newest, mask = self._newest, self._mask
        grams = zip(*(text[first - n : end - n] for n in reversed(range(least))), strict=True)
        for position, gram in enumerate(grams, start=first + 1):
            chain = hash(gram) & mask
            last = newest[chain]
            before.append(last)
            newest[chain] = position
        self._search(end, last)

    def append(self) -> None:
        """Adds the next token of the text."""
        text, end = self._text, self.done + 1
        if end < self._least:
            self._before.append(0)
            return
        chain = hash(tuple(text[end - self._least : end])) & self._mask
        last = self._newest[chain]
        self._before.append(last)
        self._newest[chain] = end
        if self.length and text[self.next] == text[end - 1]:
            self.next += 1
            self.length += 1
        else:
            self.length = 0
            if last:
                self._search(end, last)

    def following(self, count: int) -> list[int]:
        """Returns the `count` tokens that followed the match. If fewer followed, it repeats
        them."""
        found = list(self._text[self.next : min(self.next + count, self.done)])
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _search(self, end: int, place: int) -> None:
        """Finds the longest earlier match of the tokens that end at `end`; the newest of equal
        length.

        Args:
          place: the first place to compare, see `_newest`.
        """
        text, before, most = self._text, self._before, min(self._most, end)
        best = self._least - 1
        for _ in range(CANDIDATES):
            if not place:
                return
            if best < place and text[place - 1 - best] == text[end - 1 - best]:
                length, longest = 0, min(most, place)
                while length < longest and text[place - 1 - length] == text[end - 1 - length]:
                    length += 1
                if length > best:
                    best = self.length = length
                    self.next = place
                    if length >= most:
                        return
            place = before[place]
