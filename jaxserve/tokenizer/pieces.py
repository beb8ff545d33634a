"""Long texts in pieces that have the same tokens one by one as together."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

type Progress = Callable[[int], object]
"""Called with the number of tokens so far; raises to stop."""


def nothing(_tokens: int) -> None:
    """No progress is of interest."""


PIECE_CHARS = 64 * 1024
"""Encoded by one call of the library, which cannot be interrupted: some 40 ms."""
MAX_PIECE_CHARS = 8 * PIECE_CHARS
"""A longer run in which no place to cut is found is cut anyway, between two tokens perhaps other
than those of the whole: no word is so long."""

_CONTEXT = 64
_MAX_LOOKS = 256
_WORD_END = re.compile(r"[^\W_](?=[\x00-/:-@\[-`{-\x7f])")
"""Before an ASCII character that is no letter and no digit. What comes next joins no character
before it when the text is normalised."""


type Split = Callable[[str], list[tuple[str, tuple[int, int]]]]
"""A pre-tokenizer's: the words of a text with their places."""


def pieces(text: str, split: Split) -> Iterator[str]:
    """The text's parts, in order.

    A cut is at the end of a word, where the pre-tokenizer cuts, too. It is asked about the
    surroundings only: its patterns look no further.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        end = _cut(text, start + PIECE_CHARS, start + MAX_PIECE_CHARS, split)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, first: int, last: int, split: Split) -> int:
    """Where to, between the two places."""
    for look, found in enumerate(_WORD_END.finditer(text, first, last)):
        if look == _MAX_LOOKS:
            break
        if not unicodedata.is_normalized("NFC", found[0]):
            continue  # it may become a letter and a mark
        begin = found.end() - _CONTEXT
        words = split(text[begin : found.end() + _CONTEXT])
        if any(place == _CONTEXT for _, (place, _) in words):
            return found.end()
    end = min(last, len(text))
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1
    return end
