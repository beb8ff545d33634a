"""What masks must know of a tokenizer: how many tokens, which end a text, and think markers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Think:
    """Tokens and masks around a think block."""

    opens: int
    closes: int
    inside: bytes
    """All tokens but those that would end the sequence."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Vocabulary:
    """Tokens of a model, with one more where it has none that ends a text."""

    num_tokens: int
    end_token_ids: frozenset[int]
    think: Think | None
    """None: the model has no such markers."""


THINK_MARKERS = ("<think>", "</think>")


def vocabulary_of(
    tokenizer: Tokenizer, think_markers: tuple[str, str] = THINK_MARKERS
) -> Vocabulary:
    """Returns the tokenizer's vocabulary; without end tokens it gets one more token that ends."""
    num_tokens, ends = tokenizer.vocab_size, tokenizer.eos_token_ids
    if not ends:
        num_tokens, ends = num_tokens + 1, frozenset([num_tokens])
    think = _think(tokenizer, think_markers, num_tokens, ends)
    return Vocabulary(num_tokens=num_tokens, end_token_ids=ends, think=think)


def _think(
    tokenizer: Tokenizer, markers: tuple[str, str], num_tokens: int, ends: frozenset[int]
) -> Think | None:
    opens, closes = (tokenizer.markers.get(marker) for marker in markers)
    if opens is None or closes is None:
        return None
    inside = np.ones(-(-num_tokens // 32) * 32, np.uint8)
    inside[[*ends, *range(num_tokens, len(inside))]] = 0
    return Think(
        opens=opens, closes=closes, inside=np.packbits(inside, bitorder="little").tobytes()
    )
