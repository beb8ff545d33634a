"""From any sequence of tokens, the text of its decoding up to the first stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import FinishReason, Request, SamplingParams, TokenEvent
from jaxserve.server.output.generation import Choice, Generation, TextOptions
from jaxserve.tokenizer import decode
from tests.fakes import tiny_tokenizer

TINY = tiny_tokenizer()
TOKENS = st.one_of(
    st.text("aé€😀<", max_size=6).map(lambda text: list(text.encode())),
    st.lists(st.integers(0, 299), max_size=4),
    st.sampled_from([[256], [257], [258], [261], [0xE2, 0x82]]),
)


def cut(text: str, stops: tuple[str, ...], *, include: bool) -> str:
    """Read character by character until one of the stop strings is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - len(max(complete, key=len))]
    return text


@given(
    st.lists(TOKENS, max_size=8).map(lambda parts: [t for part in parts for t in part]),
    st.lists(st.text("aé€😀<\ufffd", min_size=1, max_size=3), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_the_deltas_join_to_the_decoded_text_up_to_a_stop_string(
    ids: list[int], stops: tuple[str, ...], include: bool, skip: bool, finish: FinishReason
) -> None:
    request = Request(id="r", prompt=(1,), params=SamplingParams(max_tokens=99))
    options = TextOptions(stop=stops, include_stop=include, skip_special=skip)
    choice = Choice(0, request, TINY, options)
    shown, last = "", len(ids)
    for position, token in enumerate([*ids, 0]):
        ending = finish if position == last else None
        delta = choice.add(TokenEvent("r", token, ending))
        shown += delta.text
        if delta.finish is not None:
            break
        so_far = decode(TINY, ids[: position + 1], skip_special=skip)
        assert cut(so_far, stops, include=include).startswith(shown), "shown too early"
    visible = ids if finish is FinishReason.STOP else [*ids, 0]
    expected = cut(decode(TINY, visible, skip_special=skip), stops, include=include)
    assert shown == expected


def test_the_size_of_an_answer_counts_logprobs_of_tokens_and_of_the_prompt() -> None:
    params = SamplingParams(max_tokens=9, logprobs=20, prompt_logprobs=2)
    choice = Choice(0, Request(id="r", prompt=(1,) * 5, params=params), TINY, TextOptions())
    for _ in range(3):
        choice.add(TokenEvent("r", 65))
    assert Generation([choice], 1, tokenizing=0.0).num_entries == 3 * 21 + 5 * 3
