"""Turns a stream of tokens into a stream of text: whole characters, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class Detokenizer:
    """Decodes incrementally. The texts of `push` and of the last `flush`, joined, equal `decode` of
    all tokens.

    Bytes of an unfinished character wait for the next token. Only bytes that cannot become a
    character turn into U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ):
        """`shown`: tokens to keep even if they are special."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """Returns the text of an unfinished character at the end."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, tokens: Iterable[int], *, skip_special: bool = True) -> str:
    """Returns the text of tokens, with U+FFFD for bytes that are not UTF-8."""
    skipped = tokenizer.special_ids if skip_special else frozenset[int]()
    raw = b"".join(tokenizer.token_bytes(token) for token in tokens if token not in skipped)
    return raw.decode("utf-8", "replace")


class StopStrings:
    """Cuts a text where the first stop string is complete, however the text is split.

    If several stop strings end at the same character, the longest one counts. Text that may be the
    beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text. Nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """Returns the text that can be shown now."""
        if not self._matchers:
            return text
        for end, char in enumerate(text, 1):
            complete = [m.pattern for m in self._matchers if m.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                seen = self._held + text[:end]
                return seen if self._include else seen[: len(seen) - len(self.matched)]
        seen = self._held + text
        shown = len(seen) - max(matcher.state for matcher in self._matchers)
        self._held = seen[shown:]
        return seen[:shown]

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def flush(self) -> str:
        """Returns the held text at the end of the output."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.state = 0
        return held


class _Matcher:
    """Knuth-Morris-Pratt matching. `state`: length of the longest prefix of the pattern at the end
    of the text so far."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.state = 0
        self._fallback = _fallback(pattern)

    def advance(self, char: str) -> bool:
        """Returns whether this character completes the pattern."""
        self.state = _next(self.pattern, self._fallback, self.state, char)
        return self.state == len(self.pattern)


@lru_cache(maxsize=64)
def _fallback(pattern: str) -> Sequence[int]:
    """Returns, for each matched length, the next shorter one to try. Cached for a request's other
    choices: 4,096 characters take a millisecond."""
    fallback = [0] * len(pattern)
    for position in range(1, len(pattern)):
        fallback[position] = _next(pattern, fallback, fallback[position - 1], pattern[position])
    return fallback


def _next(pattern: str, fallback: Sequence[int], state: int, char: str) -> int:
    while state and pattern[state] != char:
        state = fallback[state - 1]
    return state + 1 if pattern[state] == char else 0
