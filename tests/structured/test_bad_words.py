"""What a bad word forbids: its last token where the ones before it stand, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.structured import BadWords
from jaxserve.tokenizer import ByteTokenizer, HfTokenizer
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
    state, obeyed = BadWords(words, BYTES).start(), True
    for position in range(len(text) + 1):
        before = text[:position]
        forbidden = {ord(c) for c in "ab" if any((before + c).endswith(word) for word in words)}
        assert set(range(BYTES.vocab_size)) - allowed(state.mask) == forbidden
        if position < len(text):
            following, token = state.following, ord(text[position])
            obeyed = obeyed and token in allowed(state.mask)
            state.advance(token)
            assert state.ready
            assert not obeyed or following in (None, state.mask)


def test_who_need_not_wait_for_the_next_token_knows_the_mask_after_it() -> None:
    """Words of one token never need to; of more, where two tokens more may complete one."""
    for words, text, known in (
        (["a", "b"], "xyx", True),
        (["ab"], "xyx", False),
        (["ab", "b"], "xyx", True),  # nobody gets as far as the b
        (["abx"], "xyb", True),
        (["abx"], "xya", False),
        (["xabx"], "yxa", False),
        (["xabx"], "yya", True),
    ):
        state = BadWords(words, BYTES).start()
        for character in text:
            state.advance(ord(character))
        assert (state.following is not None) == known, (words, text)


TOKENS = st.lists(st.integers(0, 5), max_size=40)
SPELLED = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=12)


class Spelling(ByteTokenizer):
    """Words of given tokens: the text of a word is its number."""

    def __init__(self, words: list[list[int]]):
        self._words = words

    def encode_part(self, text: str) -> list[int]:
        return self._words[int(text)]


@given(words=SPELLED, tokens=TOKENS)
def test_words_of_any_tokens_are_looked_for_at_every_position(
    words: list[list[int]], tokens: list[int]
) -> None:
    """What is found by an index is what comparing with each word finds."""
    guide = BadWords(map(str, range(len(words))), Spelling(words))
    state = guide.start()
    for position in range(len(tokens) + 1):
        before = tokens[:position]
        forbidden = {word[-1] for word in words if (before + word[-1:])[-len(word) :] == word}
        assert set(range(256)) - allowed(state.mask) == forbidden
        if forbidden == {word[0] for word in words if len(word) == 1}:
            assert state.mask is guide.mask, "nothing is made anew"
        if position < len(tokens):
            state.advance(tokens[position])


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
