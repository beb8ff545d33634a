"""The facts about a tokenizer that masks need: number of tokens, end tokens, think markers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Think:
    """The tokens of think markers, and the mask inside a block."""

    opens: int
    closes: int
    inside: bytes
    """Allows all tokens except those that would end the sequence."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Vocabulary:
    """The tokens of a model, with an additional end token if the model has none."""

    num_tokens: int
    end_token_ids: frozenset[int]
    think: Think | None
    """None: the model has no think markers."""


THINK_MARKERS = ("<think>", "</think>")


def vocabulary_of(
    tokenizer: Tokenizer, think_markers: tuple[str, str] = THINK_MARKERS
) -> Vocabulary:
    """Returns the tokenizer's vocabulary, with an additional end token if it has none."""
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
