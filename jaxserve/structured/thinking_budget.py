"""A limit on a sequence's reasoning tokens, as a guide around its other guide, if any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.api import Ahead, Guide, GuideError, GuideState
from jaxserve.structured.vocabulary import THINK_MARKERS
from jaxserve.tokenizer import Tokenizer


class ThinkingBudget:
    """Implements `api.Guide`. After `most_tokens` tokens in a think block it forces `</think>`."""

    def __init__(
        self,
        most_tokens: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        inner: Guide | None = None,
        think_markers: tuple[str, str] = THINK_MARKERS,
    ):
        """The prompt may end inside a block. The tokenizer must have tokens for both markers."""
        self.most_tokens, self.inner = most_tokens, inner
        self.opens, self.closes = (tokenizer.markers[marker] for marker in think_markers)
        markers = [token for token in prompt if token in (self.opens, self.closes)]
        self.opened = markers[-1:] == [self.opens]
        self.anything = _mask(tokenizer.vocab_size, range(tokenizer.vocab_size))
        self.end = _mask(tokenizer.vocab_size, [self.closes])

    def start(self) -> ThinkingBudgetState:
        return ThinkingBudgetState(self, None if self.inner is None else self.inner.start())


class ThinkingBudgetState:
    """Implements `api.GuideState`."""

    def __init__(self, guide: ThinkingBudget, inner: GuideState | None):
        self._guide, self._inner = guide, inner
        self._left: int | None = guide.most_tokens if guide.opened else None
        """Tokens that the block may still have; None: outside of a block."""

    @property
    def ready(self) -> bool:
        return self._inner is None or self._inner.ready

    @property
    def mask(self) -> bytes:
        if self._left == 0:
            return self._guide.end  # the inner guide allows this token anywhere in a think block
        return self._guide.anything if self._inner is None else self._inner.mask

    @property
    def following(self) -> bytes | None:
        """None where the next token may be the last of the block, or may open a block without
        budget."""
        if self._left == 1 or (self._left is None and not self._guide.most_tokens):
            return None
        return self._guide.anything if self._inner is None else self._inner.following

    @property
    def error(self) -> GuideError | None:
        return None if self._inner is None else self._inner.error

    @property
    def ahead(self) -> Ahead:
        """The inner guide's drafts outside of think blocks. Inside, the budget may end."""
        if self._left is not None or self._inner is None:
            return Ahead()
        ahead = self._inner.ahead
        return Ahead() if self._guide.opens in ahead.drafts else ahead

    def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
        """See `api.GuideState`."""
        for token in tokens:
            if token == self._guide.closes:
                self._left = None
            elif self._left is not None:
                self._left -= 1
            elif token == self._guide.opens:
                self._left = self._guide.most_tokens
        if self._inner is not None:
            self._inner.advance(*tokens, drafts=drafts, most=most)

    def wait(self, timeout: float) -> bool:
        return self._inner is None or self._inner.wait(timeout)


def _mask(vocab_size: int, tokens: Iterable[int]) -> bytes:
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(tokens)] = 1
    return np.packbits(allowed, bitorder="little").tobytes()
