"""A guide against words that a sequence must not generate. It needs no grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from jaxserve.api import Ahead
from jaxserve.tokenizer import Tokenizer

_MASKS = 64
"""Masks that a guide keeps, besides the usual one."""


class BadWords:
    """Implements `api.Guide` with vLLM's meaning. It forbids the last token of a word when the
    tokens before it are present. Each word counts as it is and with a leading space. It does not
    detect other spellings of a word in tokens.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer):
        spelled = (text for word in words for text in (word, f" {word.lstrip()}"))
        words_tokens = {tuple(tokenizer.encode_part(text)): None for text in spelled}
        self.longest = max(map(len, words_tokens), default=0)
        allowed = np.zeros(-(-tokenizer.vocab_size // 32) * 32, np.uint8)
        allowed[: tokenizer.vocab_size] = 1
        never = {word[0] for word in words_tokens if len(word) == 1}
        allowed[list(never)] = 0
        self.mask = np.packbits(allowed, bitorder="little").tobytes()
        """The mask of a token that completes no longer word."""
        self._before_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Longer words by the token before their last one. Each has its tokens before that one,
        from right to left, and its last token."""
        for word in words_tokens:
            if len(word) > 1 and word[-1] not in never:
                *before, token, last = word
                self._before_last.setdefault(token, []).append((tuple(reversed(before)), last))
        self._begun: dict[int, list[tuple[int, ...]]] = {}
        """Words that lack two tokens, by the last token that is present. Each has its present
        tokens from right to left. Words of two tokens lack both from the start."""
        for word in words_tokens:
            if len(word) > 2 and never.isdisjoint(word):
                there = tuple(reversed(word[:-2]))
                self._begun.setdefault(there[0], []).append(there)
        self._pairs = any(len(word) == 2 and never.isdisjoint(word) for word in words_tokens)
        self._without = lru_cache(_MASKS)(self._mask_without)

    def start(self) -> BadWordsState:
        return BadWordsState(self)

    def mask_after(self, tokens: deque[int]) -> bytes:
        """Returns the mask of the next token after these tokens, given newest first."""
        candidates = self._before_last.get(tokens[0])
        if candidates is None:
            return self.mask
        latest = tuple(tokens)[1:]
        ends = {last for before, last in candidates if latest[: len(before)] == before}
        return self._without(frozenset(ends)) if ends else self.mask

    def lacks_two(self, tokens: deque[int]) -> bool:
        """Returns whether two more tokens may complete a word after these tokens, given newest
        first. Then the first of the two decides the mask of the second."""
        if self._pairs or not tokens:
            return self._pairs
        latest = tuple(tokens)
        return any(latest[: len(there)] == there for there in self._begun.get(tokens[0], ()))

    def _mask_without(self, tokens: frozenset[int]) -> bytes:
        changed = bytearray(self.mask)
        for token in tokens:
            changed[token // 8] &= ~(1 << token % 8)
        return bytes(changed)


class BadWordsState:
    """Implements `api.GuideState`."""

    ready = True
    error = None
    ahead = Ahead()
    """Empty: such a sequence is planned one step ahead, which excludes drafts."""

    def __init__(self, guide: BadWords):
        self._guide = guide
        self._latest: deque[int] = deque(maxlen=max(1, guide.longest - 1))
        self.mask = guide.mask

    @property
    def following(self) -> bytes | None:
        """See `api.GuideState`."""
        return None if self._guide.lacks_two(self._latest) else self._guide.mask

    def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
        del drafts, most
        self._latest.extendleft(tokens)
        self.mask = self._guide.mask_after(self._latest)

    def wait(self, timeout: float) -> bool:
        """See `api.GuideState`. The mask is ready as soon as the token is known."""
        del timeout
        return True
