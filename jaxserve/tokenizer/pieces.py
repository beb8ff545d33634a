"""Splits long texts into pieces whose separate encodings join to the encoding of the whole."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

type Progress = Callable[[int], object]
"""Called with the number of tokens so far. Raises to stop."""


def nothing(_tokens: int) -> None:
    """Ignores the progress."""


PIECE_CHARS = 64 * 1024
"""Characters per call of the library, which cannot be interrupted: about 40 ms."""
MAX_PIECE_CHARS = 8 * PIECE_CHARS
"""A longer run without a place to cut is cut anyway. Its tokens may then differ from those of the
whole. No word is this long."""

_CONTEXT = 64
_MAX_LOOKS = 256
_WORD_END = re.compile(r"[^\W_](?=[\x00-/:-@\[-`{-\x7f])")
"""A letter or digit before an ASCII character that is neither. Normalisation never joins that
character with the one before it."""


type Split = Callable[[str], list[tuple[str, tuple[int, int]]]]
"""A pre-tokenizer: returns the words of a text with their positions."""


def pieces(text: str, split: Split) -> Iterator[str]:
    """Yields the parts of the text in order.

    Each cut is at the end of a word, where the pre-tokenizer also cuts. Only the surroundings of a
    cut are checked, because the pre-tokenizer's patterns look no further.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        end = _cut(text, start + PIECE_CHARS, start + MAX_PIECE_CHARS, split)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, first: int, last: int, split: Split) -> int:
    """Returns the position of the cut, between `first` and `last`."""
    for look, found in enumerate(_WORD_END.finditer(text, first, last)):
        if look == _MAX_LOOKS:
            break
        if not unicodedata.is_normalized("NFC", found[0]):
            continue  # normalisation may split it into a letter and a mark
        begin = found.end() - _CONTEXT
        words = split(text[begin : found.end() + _CONTEXT])
        if any(place == _CONTEXT for _, (place, _) in words):
            return found.end()
    end = min(last, len(text))
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1
    return end
