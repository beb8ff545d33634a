"""What a budget of thoughts forbids: all but the end of the block, once it is used up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.structured import BadWords, ThinkingBudget
from tests.fakes import END_THINK, THINK, tiny_tokenizer
from tests.structured.test_bad_words import allowed

TOKENIZER = tiny_tokenizer()
ALL = set(range(TOKENIZER.vocab_size))
TOKENS = st.lists(st.sampled_from([ord("a"), ord("b"), THINK, END_THINK]), max_size=20)


@given(budget=st.integers(0, 4), prompt=TOKENS, wished=TOKENS)
def test_no_block_is_longer_and_nothing_else_is_forbidden(
    budget: int, prompt: list[int], wished: list[int]
) -> None:
    """A sequence gets what it wishes for where that is allowed, else what is."""
    state = ThinkingBudget(budget, TOKENIZER, prompt).start()
    inside = [token for token in prompt if token in (THINK, END_THINK)][-1:] == [THINK]
    thoughts = 0
    for token in wished:
        choice = allowed(state.mask)
        assert state.ready and state.wait(0) and state.error is None
        assert choice == ({END_THINK} if inside and thoughts == budget else ALL)
        token = token if token in choice else END_THINK
        following = state.following
        assert following is not None or thoughts + 1 == budget or not budget
        state.advance(token)
        assert following in (None, state.mask)
        thoughts = thoughts + 1 if inside and token != END_THINK else 0
        inside = token == THINK or (inside and token != END_THINK)


def test_a_guide_inside_is_followed_too() -> None:
    words = BadWords(["ab"], TOKENIZER)
    state = ThinkingBudget(2, TOKENIZER, [THINK], words).start()
    assert allowed(state.mask) == ALL
    state.advance(ord("a"))
    assert allowed(state.mask) == ALL - {ord("b")}
    state.advance(ord("a"))
    assert allowed(state.mask) == {END_THINK}
    state.advance(END_THINK)
    state.advance(ord("a"))
    assert allowed(state.mask) == ALL - {ord("b")}
