"""What a bad word forbids: its last token where the ones before it stand, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.structured import BadWords
from jaxserve.tokenizer import HfTokenizer
from jaxserve_checkpoints.resolve import embedded_model
from tests.fakes import tiny_tokenizer

BYTES = tiny_tokenizer()
WORDS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4)


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")))


@given(words=WORDS, text=st.text("ab ", max_size=12))
def test_a_token_is_forbidden_if_and_only_if_it_completes_a_word(
    words: list[str], text: str
) -> None:
    """Tokens are characters here."""
    state = BadWords(words, BYTES).start()
    for position in range(len(text) + 1):
        before = text[:position]
        forbidden = {ord(c) for c in "ab" if any((before + c).endswith(word) for word in words)}
        assert set(range(BYTES.vocab_size)) - allowed(state.mask) == forbidden
        if position < len(text):
            state.advance(ord(text[position]))
            assert state.ready


def test_a_word_of_a_real_tokenizer_is_kept_out_with_and_without_a_space() -> None:
    tokenizer = HfTokenizer.from_folder(embedded_model())
    guide = BadWords(["Paris"], tokenizer)
    for text in ("Paris", " Paris"):
        *before, last = tokenizer.encode(text)
        state = guide.start()
        for token in before:
            assert token in allowed(state.mask)
            state.advance(token)
        assert last not in allowed(state.mask)
