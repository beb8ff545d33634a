"""Texts of others are looked up as a slow search would, and a tenant's by that tenant alone."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.hit_rates import HitRates
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.speculation.other_texts import Follower, OtherTexts
from jaxserve.scheduler.verify import Verification

tokens = st.lists(st.integers(0, 2), max_size=30)
writings = st.lists(st.tuples(st.integers(0, 1), tokens), max_size=12)
"""Texts of two owners, of few letters."""


def common(text: list[int], place: int, end: list[int]) -> int:
    """How many tokens before `place` are those at the end."""
    length = 0
    while length < min(place, len(end)) and text[place - 1 - length] == end[len(end) - 1 - length]:
        length += 1
    return length


@given(written=writings, end=tokens, least=st.integers(1, 3))
def test_an_owner_finds_the_longest_occurrence_in_its_texts_alone(
    written: list[tuple[int, list[int]]], end: list[int], least: int
) -> None:
    texts = OtherTexts(1024, least=least, most=1000)
    for owner, text in written:
        texts.add(text, owner)
    for owner in (0, 1):
        own = [text for each, text in written if each == owner]
        expected = max(
            (common(text, n, end) for text in own for n in range(len(text) + 1)), default=0
        )
        place, length = texts.find(end, len(end), owner)
        if length:
            rest = texts.following(place, 40)
            assert any(
                common(text, len(text) - len(rest), end) == length
                and tuple(text[len(text) - len(rest) :]) == rest
                for text in own
            )
        assert length <= expected and bool(length) <= (expected >= least)
        if sum(len(text) for _, text in written) <= 32:  # all candidates are looked at
            assert length == (expected if expected >= least else 0)


@given(written=writings, seed=st.integers(0, 99))
def test_a_small_ring_forgets_the_oldest_and_mixes_nothing(
    written: list[tuple[int, list[int]]], seed: int
) -> None:
    """Owners have letters of their own, so a foreign token would be seen."""
    texts, draw = OtherTexts(16, least=2, most=9), Random(seed)
    for owner, text in written:
        texts.add([token + 3 * owner for token in text], owner)
        for each in (0, 1):
            end = [draw.randrange(3) + 3 * each for _ in range(6)]
            place, length = texts.find(end, len(end), each)
            found = texts.following(place, 40) if length else ()
            assert all(token // 3 == each for token in found) and len(found) < 16
            assert not length or [texts.token(place - 1 - n) for n in range(length)] == [
                end[-1 - n] for n in range(length)
            ]


def sequence(prompt: list[int], output: list[int], **asked: object) -> Sequence:
    request = Request(
        id="a",
        prompt=tuple(prompt),
        params=SamplingParams(max_tokens=900),
        **asked,  # pyright: ignore[reportArgumentType]
    )
    seq = Sequence.of(request, seq_id=1, limit=9999, level=0, root=b"", now=0.0, ttft_slo=None)
    seq.tokens += output
    return seq


def drafts(lookup: Lookup, seq: Sequence) -> tuple[int, ...] | None:
    found = lookup([seq])
    return found[seq.id].drafts if found else None


def test_outputs_are_looked_up_for_the_same_tenant_and_salt_only() -> None:
    lookup = Lookup(drafts=3, shared=1000)
    first = sequence([1, 2], list(range(10, 60)), tenant="a")
    lookup.ended(first)
    assert drafts(lookup, sequence([7, 8], [20, 21, 22, 23], tenant="a")) == (24, 25, 26)
    assert drafts(lookup, sequence([7, 8], [20, 21, 22, 23], tenant="b")) is None
    salted = sequence([7, 8], [20, 21, 22, 23], tenant="a")
    salted.root = b"another"
    assert drafts(lookup, salted) is None
    assert drafts(Lookup(drafts=3), sequence([7, 8], [20, 21, 22, 23], tenant="a")) is None


def test_what_a_client_predicts_is_followed_from_its_beginning_and_found_again() -> None:
    lookup, predicted = Lookup(drafts=3), tuple(range(100, 160))
    seq = sequence([1, 2], [], predicted=predicted)
    assert drafts(lookup, seq) == (100, 101, 102)
    seq.tokens += [100, 101]
    assert drafts(lookup, seq) == (102, 103, 104)
    seq.tokens += [5]
    assert drafts(lookup, seq) is None, "it goes on otherwise"
    seq.tokens += [103, 104, 105]
    assert drafts(lookup, seq) == (106, 107, 108)
    seq.in_flight = 1
    assert drafts(lookup, seq) == (107, 108, 109)
    seq.tokens += list(predicted[6:])
    seq.in_flight = 0
    assert drafts(lookup, seq) is None, "it is at its end"


def test_a_sequence_that_is_asked_for_late_is_found_by_its_end() -> None:
    lookup, predicted = Lookup(drafts=3), tuple(range(100, 400))
    seq = sequence([1, 2], list(predicted[:200]), predicted=predicted)
    assert drafts(lookup, seq) == (300, 301, 302)


def test_rates_are_learned_from_what_followed() -> None:
    texts, rates = OtherTexts(256, least=3, most=32), HitRates()
    texts.add(list(range(100)), 0)
    follower, seq = Follower(texts, 0, rates, 0), list[int]()
    before = rates.survival(4, follower._rate, 1)[0]  # pyright: ignore[reportPrivateUsage]
    for one, _ in pairwise(range(90)):
        seq.append(one)
        follower.read(seq)
    assert follower.drafts(2)[0] == (89, 90)
    assert follower.drafts(2)[1][0] > before


def test_the_scheduler_keeps_what_has_ended() -> None:
    lookup = Lookup(drafts=3, shared=100)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32),
        CacheConfig(num_pages=20, page_size=4),
        verification=Verification(proposer=lookup, buckets=((2, 4),), ended=lookup.ended),
    )
    scheduler.add(Request(id="a", prompt=(1, 2), params=SamplingParams(max_tokens=4), tenant="t"))
    for token in (41, 42, 43, 44):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [Sampled(token)])
    assert not scheduler.has_work
    root = Sequence.of(
        Request(id="b", prompt=(9,), params=SamplingParams(max_tokens=9), tenant="t"),
        seq_id=2,
        limit=99,
        level=0,
        root=b"",
        now=0.0,
        ttft_slo=None,
    )
    scheduler.add(Request(id="b", prompt=(9,), params=SamplingParams(max_tokens=9), tenant="t"))
    (live,) = scheduler._live.values()  # pyright: ignore[reportPrivateUsage]
    root.root = live.root
    root.tokens += [41, 42, 43]
    assert drafts(lookup, root) == (44,)
