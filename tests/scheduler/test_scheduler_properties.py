"""Whatever happens around a request, it gets the tokens it would get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from jaxserve.api import FinishReason, Rejected, Request, SamplingParams
from jaxserve.config import POLICIES, CacheConfig, PagedGroup, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Proposal, Verification
from tests.scheduler.fake_runner import VOCAB, FakeGuide, solo
from tests.scheduler.loop import Loop, Optimist
from tests.scheduler.proposers import KINDS, Guesses


class Arrival(NamedTuple):
    request: Request
    turn: int
    abort_delay: int | None
    """Turns until the client gives up."""
    abort_after_launch: bool


class Workload(NamedTuple):
    config: SchedulerConfig
    cache: CacheConfig
    arrivals: list[Arrival]
    ahead: tuple[int, ...]
    """Steps in flight after each turn, repeated: 0 is synchronous, 1 is one step ahead."""
    failing_turn: int | None
    optimist: bool
    """Whether admission hopes for the best, so that sequences are preempted."""
    reset_turn: int | None
    """When the prefix cache is reset."""
    drafts: tuple[str, int] | None = None
    """Kind and seed of `Guesses`."""

    def verification(self) -> Verification | None:
        if self.drafts is None:
            return None
        kind, seed = self.drafts
        if kind == "looked up":
            lookup = Lookup(drafts=7, least=1 + seed % 3, shared=32 * (seed % 2))
            return Verification(
                proposer=lookup, buckets=((1, 8), (4, 4), (8, 2)), ended=lookup.ended
            )
        outputs = {
            each.request.id: solo(each.request, self.config, self.cache)[0]
            for each in self.arrivals
            if len(each.request.prompt) < self.config.max_model_len
        }
        guesses = Guesses(lambda seq: outputs[seq.request_id], kind=kind, vocab=VOCAB, seed=seed)
        return Verification(proposer=guesses, buckets=((1, 8), (4, 4), (8, 2)))


LAST_ARRIVAL = 8
MOST_DELAY = 3
AHEAD = FakeGuide(0, ahead=True)
"""Turns until a mask is there."""
tokens = st.integers(0, VOCAB - 1)
STOPS: list[frozenset[int]] = [frozenset(), frozenset(), frozenset({0}), frozenset({1, 2})]


@st.composite
def requests(draw: st.DrawFn, number: int, *, long_outputs: bool) -> Request:
    return Request(
        id=f"r{number}",
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=5 if long_outputs else 12))),
        params=SamplingParams(
            max_tokens=draw(st.sampled_from([16, 12] if long_outputs else [8, 5, 2, 1])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from(STOPS)),
            min_tokens=draw(st.sampled_from([0, 0, 3, 10] if long_outputs else [0, 0, 3])),
            guide=draw(
                st.sampled_from([None, None, None, FakeGuide(0), FakeGuide(MOST_DELAY), AHEAD])
            ),
        ),
        cache_salt=draw(st.sampled_from(["", "", "", "a"])),
    )


@st.composite
def arrivals(draw: st.DrawFn, number: int, *, long_outputs: bool) -> Arrival:
    return Arrival(
        request=draw(requests(number, long_outputs=long_outputs)),
        turn=draw(st.integers(0, 1 if long_outputs else LAST_ARRIVAL)),
        abort_delay=draw(st.sampled_from([None] * 20 + list(range(12)))),
        abort_after_launch=draw(st.booleans()),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Half of them have several long outputs at once in a small pool, so that many preempt."""
    long_outputs = draw(st.booleans())
    max_num_seqs = draw(st.sampled_from([3, 5, 4] if long_outputs else [3, 5, 2, 4, 1]))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.sampled_from([24, 19] if long_outputs else [24, 16, 9])),
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        max_chunk_context=draw(st.sampled_from([None, None, 24])),
        policy=draw(st.sampled_from(POLICIES)),
    )
    page_size = draw(st.sampled_from([2, 1] if long_outputs else [2, 4, 1]))
    pool_tokens = draw(st.integers(10, 24) if long_outputs else st.integers(8, 32))
    cache = CacheConfig(
        num_pages=1 + pool_tokens // page_size,
        page_size=page_size,
        own_tokens=page_size * draw(st.sampled_from([0, 0, 1, 2])),
    )
    count = draw(st.sampled_from([4, 5, 3] if long_outputs else [4, 8, 6, 3, 2, 1]))
    return Workload(
        config=config,
        cache=cache,
        arrivals=[draw(arrivals(number, long_outputs=long_outputs)) for number in range(count)],
        ahead=draw(st.sampled_from([(1,), (0,), (1,), (0, 1), (2, 0, 1)])),
        failing_turn=draw(st.sampled_from([None] * 40 + list(range(12)))),
        optimist=long_outputs or draw(st.booleans()),
        reset_turn=draw(st.sampled_from([None] * 20 + list(range(12)))),
    )


@st.composite
def windowed_workloads(draw: st.DrawFn) -> Workload:
    """The same with one to three cache groups, of which at least one has a window."""
    work = draw(workloads())
    cache, size = work.cache, work.cache.page_size

    def windowed(window: int) -> PagedGroup:
        least = -(-(window - 1) // size) + 1
        return PagedGroup(num_pages=1 + least + draw(st.integers(0, 6)), window=window)

    groups = [windowed(draw(st.integers(1, 9))) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    if draw(st.booleans()):
        first, *further = groups
        cache = replace(cache, num_pages=first.num_pages, window=first.window)
        groups = further
    return work._replace(cache=replace(cache, further=tuple(groups)))


@st.composite
def drafted_workloads(draw: st.DrawFn) -> Workload:
    """The same with drafts, with windows or without. Most have room for drafts now and then: no
    more requests than slots, and some more tokens and pages."""
    work = draw(st.one_of(workloads(), windowed_workloads()))
    drafts = draw(st.sampled_from([*KINDS, "looked up"])), draw(st.integers(0, 99))
    if draw(st.sampled_from([True, True, True, False])):
        config, cache = work.config, work.cache
        tokens, pages = config.max_num_batched_tokens + 16, draw(st.integers(0, 16))
        more = tuple(replace(each, num_pages=each.num_pages + pages) for each in cache.further)
        work = work._replace(
            arrivals=work.arrivals[: config.max_num_seqs],
            config=replace(config, max_num_batched_tokens=tokens),
            cache=replace(cache, num_pages=cache.num_pages + pages, further=more),
        )
    return work._replace(drafts=drafts)


def play(work: Workload) -> Loop:
    """Run a workload to its end; the loop's own checks are half of the property."""
    lengths = Optimist() if work.optimist else OutputLengths()
    loop = Loop(work.config, work.cache, lengths=lengths, verification=work.verification())
    idle = 0
    for turn in range(2000):
        for arrival in work.arrivals:
            if arrival.turn == turn:
                _add(loop, arrival.request, work)
        _abort(loop, work, turn, after_launch=False)
        if turn == work.reset_turn:
            loop.scheduler.reset_prefix_cache()
        if loop.launch() is None:
            if loop.in_flight:
                idle = 0
                loop.commit(failing=turn == work.failing_turn)
            elif loop.scheduler.has_work:
                idle += 1
                assert idle <= MOST_DELAY, "there is work, but nothing can be planned"
            elif turn > LAST_ARRIVAL:
                return loop
        else:
            idle = 0
        _abort(loop, work, turn, after_launch=True)
        while len(loop.in_flight) > work.ahead[turn % len(work.ahead)]:
            loop.commit(failing=turn == work.failing_turn)
    raise AssertionError("no progress")


def _add(loop: Loop, request: Request, work: Workload) -> None:
    length = len(request.prompt)  # the last token of a sequence is never computed
    fits = length < work.config.max_model_len and length <= work.cache.longest
    if fits:
        loop.add(request)
    else:
        with pytest.raises(Rejected):
            loop.add(request)


def _abort(loop: Loop, work: Workload, turn: int, *, after_launch: bool) -> None:
    for arrival in work.arrivals:
        due = arrival.abort_delay is not None and turn == arrival.turn + arrival.abort_delay
        if due and after_launch == arrival.abort_after_launch:
            loop.abort(arrival.request.id)


def check_against_solo(work: Workload) -> None:
    loop = play(work)
    least = most = 0
    for arrival in work.arrivals:
        request_id = arrival.request.id
        if request_id not in loop.events:
            continue  # rejected
        expected, reason = solo(arrival.request, work.config, work.cache)
        got, finish = loop.tokens(request_id), loop.finish(request_id)
        length = len(arrival.request.prompt)
        least, most = least + length * bool(got), most + length
        if finish is FinishReason.ERROR:
            assert work.failing_turn is not None and got == expected[: len(got)]
        elif finish is None:
            assert arrival.abort_delay is not None and got == expected[: len(got)]
        else:
            assert (got, finish) == (expected, reason)
    assert least <= loop.scheduler.num_prompt_tokens <= most, "each counts once"
    for pool, group in zip(loop.scheduler.pools, work.cache.groups, strict=True):
        assert pool.num_free == group.usable_pages
    assert loop.scheduler.num_running == loop.scheduler.num_waiting == 0
    event(f"prefix hits: {loop.hit_tokens > 0}")
    event(f"evictions: {min(len(loop.evicted), 3)}")
    event(f"preemptions: {min(loop.scheduler.num_preemptions, 3)}")
    event(f"wasted rows: {min(loop.wasted_rows, 3)}")
    if work.drafts is not None:
        event(f"accepted drafts: {next(most for most in (0, 2, 8, 99) if loop.accepted <= most)}")
        event(f"verify rows ahead: {loop.rows_ahead > 0}")
        event(f"masks of several positions: {loop.masked_rows > 0}")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_each_request_gets_the_tokens_it_would_get_alone(work: Workload) -> None:
    check_against_solo(work)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(windowed_workloads())
def test_with_windows_each_request_gets_the_tokens_it_would_get_alone(work: Workload) -> None:
    check_against_solo(work)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drafted_workloads())
def test_with_drafts_each_request_gets_the_tokens_it_would_get_alone(work: Workload) -> None:
    check_against_solo(work)


@pytest.mark.parametrize("guide", [None, FakeGuide(0)])
@pytest.mark.parametrize("right", range(8))
def test_every_number_of_accepted_drafts_yields_the_tokens_of_plain_decoding(
    right: int, guide: FakeGuide | None
) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_model_len=60, max_num_batched_tokens=16)
    cache = CacheConfig(num_pages=20, page_size=4)
    params = SamplingParams(max_tokens=40, guide=guide)
    expected = solo(request := Request(id="a", prompt=(1, 2), params=params), config, cache)

    def propose(sequences: list[Sequence]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for seq in sequences:
            following = expected[0][seq.computed + 1 - seq.num_prompt :][:7]
            drafts = [*following[:right], *((token + 1) % VOCAB for token in following[right:])]
            found[seq.id] = Proposal(8, tuple(drafts), (0.9,) * len(drafts))
        return found

    loop = Loop(config, cache, verification=Verification(proposer=propose, buckets=((1, 8),)))
    loop.add(request)
    loop.run(ahead=0)
    assert (loop.tokens("a"), loop.finish("a")) == expected
    assert loop.accepted_of_rows.count(right) >= 3
    assert (loop.masked_rows > 0) == (guide is not None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drafted_workloads())
def test_with_drafts_each_request_gets_its_tokens_in_many_workloads(work: Workload) -> None:
    check_against_solo(work)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(windowed_workloads())
def test_with_windows_each_request_gets_its_tokens_in_many_workloads(work: Workload) -> None:
    check_against_solo(work)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_each_request_gets_the_tokens_it_would_get_alone_in_many_workloads(work: Workload) -> None:
    check_against_solo(work)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_knows_the_mask_after_the_next_one_gets_a_token_in_every_step(ahead: bool) -> None:
    params = SamplingParams(max_tokens=8, guide=FakeGuide(0, ahead=ahead))
    config = SchedulerConfig(max_num_seqs=1, max_model_len=32, max_num_batched_tokens=16)
    scheduler = Scheduler(config, CacheConfig(num_pages=9, page_size=16))
    scheduler.add(Request(id="a", prompt=(1, 2, 3), params=params))
    plans = [scheduler.plan(), scheduler.plan()]
    assert [plan is not None for plan in plans] == [True, ahead]
