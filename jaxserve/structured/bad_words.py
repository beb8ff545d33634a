"""Words that a sequence must not generate, as a guide: no grammar, but a mask per token, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.tokenizer import Tokenizer


class BadWords:
    """Implements `api.Guide`, with vLLM's meaning: the last token of a word is forbidden where the
    tokens before it are there. Each word counts as it is and with a space before it; a word that
    is spelled in other tokens is not seen.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer):
        spelled = (text for word in words for text in (word, f" {word.lstrip()}"))
        self.words = tuple({tuple(tokenizer.encode(text)): None for text in spelled})
        self.longest = max(map(len, self.words), default=0)
        allowed = np.zeros(-(-tokenizer.vocab_size // 32) * 32, np.uint8)
        allowed[: tokenizer.vocab_size] = 1
        allowed[[word[0] for word in self.words if len(word) == 1]] = 0
        self.mask = np.packbits(allowed, bitorder="little").tobytes()
        """Of a token that completes no longer word."""

    def start(self) -> BadWordsState:
        return BadWordsState(self)


class BadWordsState:
    """Implements `api.GuideState`."""

    ready = True
    error = None

    def __init__(self, guide: BadWords):
        self._guide = guide
        self._last: tuple[int, ...] = ()
        self.mask = guide.mask

    def advance(self, token: int) -> None:
        guide = self._guide
        self._last = (*self._last, token)[-guide.longest :]
        ends = [word[-1] for word in guide.words if len(word) > 1 and self._ends_in(word[:-1])]
        self.mask = _without(guide.mask, ends) if ends else guide.mask

    def wait(self, timeout: float) -> bool:
        """See `api.GuideState`: the mask is there as soon as the token is."""
        del timeout
        return True

    def _ends_in(self, tokens: Sequence[int]) -> bool:
        return self._last[-len(tokens) :] == tuple(tokens)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] &= ~(1 << token % 8)
    return bytes(changed)
