"""With a tier below the device each request gets the tokens it would get alone, whatever becomes of
its copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from jaxserve.api import FinishReason, Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from tests.scheduler.fake_host import Faults, Page, TierLoop
from tests.scheduler.fake_runner import solo
from tests.scheduler.loop import Optimist
from tests.scheduler.test_scheduler_properties import (
    LAST_ARRIVAL,
    Workload,
    windowed_workloads,
    workloads,
)
from tests.scheduler.test_snapshots import snapshot_workloads

TOTAL = Counter[str]()
"""What happened in all workloads of a run."""


class TierWorkload(NamedTuple):
    work: Workload
    host_slots: int
    ring: int
    faults: Faults
    seed: int
    disk: bool
    load_rate: float | None = None
    """Pages per second, of which a step takes a tenth."""


@st.composite
def tier_workloads(
    draw: st.DrawFn, works: st.SearchStrategy[Workload] | None = None, *, resets: bool = False
) -> TierWorkload:
    """Prompts of few kinds, which come again when others have displaced them. resets: the cache is
    emptied late, too, when there are loads."""
    any_kind = st.one_of(workloads(), workloads(), windowed_workloads())
    work = draw(any_kind if works is None else works)
    shares = st.sampled_from([0.0, 0.0, 0.3])
    arrivals = list(work.arrivals)
    for number in range(draw(st.sampled_from([8, 4, 12]))):
        first = draw(st.sampled_from(work.arrivals))
        turn = draw(st.integers(0, 40))
        tail = draw(st.lists(st.integers(0, 3), max_size=4))
        request = replace(first.request, id=f"again{number}", prompt=(*first.request.prompt, *tail))
        delay = draw(st.sampled_from([None] * 12 + list(range(8))))
        arrivals.append(first._replace(request=request, turn=turn, abort_delay=delay))
    failing = draw(st.sampled_from([None] * 60 + list(range(6, 40))))
    if resets and (turn := draw(st.sampled_from([None] * 60 + list(range(6, 40))))):
        work = work._replace(reset_turn=turn)
    config = replace(work.config, prefix_caching=True, max_queued=100)
    return TierWorkload(
        work._replace(arrivals=arrivals, config=config, failing_turn=failing),
        host_slots=draw(st.sampled_from([8, 20, 3, 50])),
        ring=draw(st.sampled_from([2, 1, 4])),
        faults=Faults(
            late=draw(st.sampled_from([0.5, 0.0, 0.9])),
            failed=draw(shares),
            never=draw(st.sampled_from([0.0, 0.0, 0.1])),
            lost_files=draw(shares),
        ),
        seed=draw(st.integers(0, 1000)),
        disk=draw(st.booleans()),
    )


@st.composite
def recurrent_tier_workloads(draw: st.DrawFn) -> TierWorkload:
    """With room for the pieces of a few snapshots."""
    tiered = draw(tier_workloads(snapshot_workloads()))
    host_slots, ring = draw(st.sampled_from([50, 20, 100])), draw(st.sampled_from([8, 4, 2]))
    return tiered._replace(host_slots=host_slots, ring=ring)


def play(tiered: TierWorkload) -> TierLoop:
    work = tiered.work
    lengths = Optimist() if work.optimist else OutputLengths()
    files: dict[bytes, Page] | None = {} if tiered.disk else None
    loop = TierLoop(
        work.config,
        work.cache,
        host_slots=tiered.host_slots,
        ring=tiered.ring,
        faults=tiered.faults,
        seed=tiered.seed,
        files=files,
        load_rate=tiered.load_rate,
        lengths=lengths,
    )
    last = max(LAST_ARRIVAL, *(arrival.turn for arrival in work.arrivals))
    for turn in range(3000):
        _arrive(loop, work, turn)
        if turn == work.reset_turn:
            loop.scheduler.reset_prefix_cache()
        if loop.launch() is None and loop.in_flight:
            loop.commit(failing=turn == work.failing_turn)
        while len(loop.in_flight) > work.ahead[turn % len(work.ahead)]:
            loop.commit(failing=turn == work.failing_turn)
        if turn > last and not loop.in_flight and not loop.scheduler.has_work:
            loop.drain()
            return loop
    raise AssertionError("no progress")


def _arrive(loop: TierLoop, work: Workload, turn: int) -> None:
    for arrival in work.arrivals:
        length = len(arrival.request.prompt)
        if length >= work.config.max_model_len or length > work.cache.longest:
            continue
        if arrival.turn == turn:
            loop.add(arrival.request)
        delay = arrival.abort_delay
        if delay is not None and turn == arrival.turn + delay:
            loop.abort(arrival.request.id)


def check(tiered: TierWorkload) -> TierLoop:
    loop, work = play(tiered), tiered.work
    for arrival in work.arrivals:
        name = arrival.request.id
        if name not in loop.events:
            continue  # it was too long
        expected, reason = solo(arrival.request, work.config, work.cache)
        got, finish = loop.tokens(name), loop.finish(name)
        if finish is FinishReason.ERROR:
            assert work.failing_turn is not None and got == expected[: len(got)]
        elif finish is None:
            assert arrival.abort_delay is not None and got == expected[: len(got)]
        else:
            assert (got, finish) == (expected, reason)
    for pool, group in zip(loop.scheduler.pools, work.cache.groups, strict=True):
        assert pool.num_free == group.usable_pages
    TOTAL["requests"] += len(loop.events)
    TOTAL["loads"] += len(loop.observer.loaded)
    TOTAL["restored pages"] += sum(loop.observer.loaded)
    TOTAL["restored pieces"] += loop.restored_pieces
    TOTAL["stores"] += loop.copier.stores
    TOTAL["preemptions"] += loop.scheduler.num_preemptions
    TOTAL["reads"] += loop.disk.reads if loop.disk else 0
    TOTAL.update({f"recomputed: {cause}": n for cause, n in loop.observer.recomputed.items()})
    TOTAL.update({f"skipped: {cause}": n for cause, n in loop.observer.skipped.items()})
    event(f"loads: {min(len(loop.observer.loaded), 3)}")
    return loop


@pytest.fixture
def total() -> Counter[str]:
    TOTAL.clear()
    return TOTAL


def test_each_request_gets_the_tokens_it_would_get_alone(total: Counter[str]) -> None:
    @settings(  # the same ones each time, because what they meet is counted
        max_examples=100,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(tier_workloads())
    def run(tiered: TierWorkload) -> None:
        check(tiered)

    run()
    assert total["loads"] > 30 and total["restored pages"] > total["loads"]
    assert total["recomputed: copy"] and total["reads"]


def test_state_comes_back_with_its_pages(total: Counter[str]) -> None:
    """Rows of the fake runner check that they find the state of their own tokens."""

    @settings(  # the same ones each time, too
        max_examples=100,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(recurrent_tier_workloads())
    def run(tiered: TierWorkload) -> None:
        check(tiered)

    run()
    assert total["loads"] > 5 and total["restored pieces"] > 10, total


@pytest.mark.slow
def test_state_comes_back_with_its_pages_in_many_workloads(total: Counter[str]) -> None:
    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recurrent_tier_workloads())
    def run(tiered: TierWorkload) -> None:
        check(tiered)

    run()
    print(dict(total))
    assert total["loads"] > 500 and total["restored pieces"] > 1000
    for cause in ("copy", "disk", "pages"):
        assert total[f"recomputed: {cause}"], cause


@pytest.mark.slow
def test_10_000_requests_get_the_tokens_they_would_get_alone(total: Counter[str]) -> None:
    @settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(tier_workloads(resets=True))
    def run(tiered: TierWorkload) -> None:
        check(tiered)

    run()
    print(dict(total))
    assert total["requests"] > 10_000 and total["loads"] > 1000
    for cause in ("copy", "disk", "timeout", "pages", "device", "forgotten"):
        assert total[f"recomputed: {cause}"], cause


def test_every_page_of_a_prefix_gets_its_file_however_slowly_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefix with a hole is worth nothing at the next start."""
    monkeypatch.setattr("jaxserve.scheduler.disk_pages._WRITES", 1)
    config = SchedulerConfig(max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64)
    files: dict[bytes, Page] = {}
    loop = TierLoop(
        config,
        CacheConfig(num_pages=14, page_size=4),
        host_slots=40,
        ring=8,
        faults=Faults(late=0.5),
        files=files,
    )
    for number in range(3):
        prompt = tuple((number + each) % 3 for each in range(45))
        loop.add(Request(id=f"r{number}", prompt=prompt, params=SamplingParams(max_tokens=2)))
        for _ in range(200):
            loop.launch()
            while loop.in_flight:
                loop.commit()
    loop.drain()
    stored = len(loop.tier.index)
    assert stored > 10
    assert len(files) == stored


def test_who_waited_for_the_pages_of_an_aborted_load_goes_on() -> None:
    """Nothing else wakes it: nobody runs."""
    config = SchedulerConfig(max_num_seqs=2, max_model_len=24, max_num_batched_tokens=24)
    cache = CacheConfig(num_pages=5, page_size=4)
    loop = TierLoop(config, cache, host_slots=20, faults=Faults(late=0.0))

    def request(name: str, *prompt: int) -> Request:
        return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=1))

    kept = (1, 2, 3, 0) * 2
    loop.add(request("first", *kept, 1, 2))
    loop.run()
    loop.drain()
    loop.add(request("displaces it", *(2, 2, 3, 1) * 3, 1, 2))
    loop.run()
    loop.drain()
    loop.copier.draining = False
    loop.copier.faults = Faults(late=1.0)  # from now on copies take as long as they like
    loop.add(request("again", *kept, 1, 2))
    loop.launch()
    assert len(loop.copier.jobs) > 0, "its pages are on their way"
    loop.add(request("waits", *(3, 3, 1, 0) * 3, 1, 2))
    assert loop.launch() is None, "the load holds pages that it needs"
    loop.abort("again")
    assert loop.launch() is None  # behind it the load is given up
    assert loop.launch() is not None
    loop.run()
    assert loop.finish("waits") is FinishReason.LENGTH
    loop.drain()
