"""What is looked up is what a slow search finds, and what is learned is how often it was right."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation import lookup, suffix_index
from jaxserve.scheduler.speculation.hit_rates import HitRates, OwnRate
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.speculation.suffix_index import SuffixIndex

texts = st.integers(1, 4).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=80)
)
"""Of few letters, so that ends occur again."""


def common(text: list[int], place: int, end: int) -> int:
    """How many tokens before `place` are those before `end`."""
    length = 0
    while length < place and text[place - 1 - length] == text[end - 1 - length]:
        length += 1
    return length


def longest(text: list[int]) -> int:
    return max((common(text, place, len(text)) for place in range(1, len(text))), default=0)


@pytest.fixture
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks at all candidates."""
    monkeypatch.setattr(suffix_index, "CANDIDATES", 1000)


@given(text=texts, least=st.integers(1, 4), first=st.integers(0, 80))
@pytest.mark.usefixtures("thorough")
def test_an_index_finds_the_longest_occurrence_of_the_end(
    text: list[int], least: int, first: int
) -> None:
    """However the text came: a part at once, the rest token by token."""
    grown: list[int] = text[:first]
    index = SuffixIndex(grown, least=least, most=1000)
    for start, end in pairwise(range(0, len(grown) + 7, 7)):
        index.index(end - start)
    for token in text[len(grown) :]:
        check(grown, index, least)
        grown.append(token)
        index.append()
    check(grown, index, least)


def check(text: list[int], index: SuffixIndex, least: int) -> None:
    assert index.done == len(text)
    expected = longest(text)
    assert index.length == (expected if expected >= least else 0)
    if index.length:
        assert common(text, index.next, len(text)) == expected


@given(text=texts, candidates=st.integers(1, 4))
def test_a_search_that_looks_at_few_places_finds_an_occurrence(
    text: list[int], candidates: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_index, "CANDIDATES", candidates)
        grown: list[int] = []
        index = SuffixIndex(grown, least=2, most=5)
        for token in text:
            grown.append(token)
            index.append()
            assert index.length in range(min(longest(grown), 1), longest(grown) + 1) or (
                index.length == 0
            )
            if index.length:
                assert common(grown, index.next, len(grown)) >= index.length


def test_what_follows_goes_on_in_a_circle_where_it_meets_the_end() -> None:
    text = [1, 2, 3, 1, 2, 3, 1]
    index = SuffixIndex(text, least=3, most=9)
    index.index(len(text))
    assert (index.length, index.next) == (4, 4)
    assert index.following(7) == [2, 3, 1, 2, 3, 1, 2]


def sequence(*tokens: int) -> Sequence:
    request = Request(id="a", prompt=tokens, params=SamplingParams(max_tokens=100))
    return Sequence.of(request, seq_id=1, limit=999, level=0, root=b"", now=0.0, ttft_slo=None)


def test_drafts_are_those_after_what_is_in_flight() -> None:
    seq = sequence(*range(60), *range(40))
    (proposal,) = Lookup(drafts=3)([seq]).values()
    assert proposal.drafts == (40, 41, 42) and proposal.positions == len(proposal.survival) + 1
    seq.in_flight = 1
    (late,) = Lookup(drafts=3)([seq]).values()
    assert late.drafts == (41, 42, 43), "the token in flight should be 40"
    assert late.survival[0] == pytest.approx(proposal.survival[1])
    seq.drafts_in_flight = 3
    (later,) = Lookup(drafts=3)([seq]).values()
    assert later.drafts == (41, 42, 43, 44, 45, 46), "any number of those in flight may be right"
    assert sum(later.survival) < sum(late.survival)


def test_nothing_is_drafted_where_nothing_occurred_before() -> None:
    assert not Lookup(drafts=7)([sequence(1, 2, 3, 4, 5, 6)])
    assert not Lookup(drafts=7)([sequence(1, 2)])


def test_prompts_are_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one must not hold the step up."""
    monkeypatch.setattr(lookup, "INDEXED_PER_STEP", 20)
    propose = Lookup(drafts=3)
    one, other = sequence(*range(25), 0, 1, 2), sequence(*range(25), 4, 5, 6)
    steps = [propose([one, other]) for _ in range(3)]
    assert [len(step) for step in steps] == [0, 1, 1]
    drafts = [next(iter(step.values())).drafts for step in steps[1:]]
    assert drafts[0] == (3, 4, 5)


def test_learned_rates_follow_what_comes_and_forget() -> None:
    rates = HitRates()
    before = rates.survival(5, OwnRate(), 1)[0]
    for _ in range(2000):
        rates.count(5, OwnRate(), hit=True)
    assert rates.survival(5, OwnRate(), 1)[0] > 0.95 > before
    for _ in range(2000):
        rates.count(5, OwnRate(), hit=False)
    assert sum(rates.survival(5, OwnRate(), 7)) < 0.1
    assert rates.survival(40, OwnRate(), 1)[0] > 0.9, "of longer occurrences nothing was learned"


def test_a_sequence_differs_from_all_others() -> None:
    rates, edit, chat = HitRates(), OwnRate(), OwnRate()
    for _ in range(300):
        rates.count(10, edit, hit=True)
        rates.count(10, chat, hit=False)
    assert rates.survival(10, edit, 1)[0] > 0.9
    assert sum(rates.survival(10, chat, 1)) < 0.2
