"""Loads take at most a given rate while other sequences run, and nobody waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, ConfigError, HostTierConfig, SchedulerConfig
from jaxserve.scheduler import loading
from jaxserve.scheduler.load import Load
from jaxserve.scheduler.load_pace import LoadPace
from jaxserve.scheduler.load_rates import MOST_WAIT, Decision, LoadRates
from jaxserve.scheduler.loading import Loads
from tests.scheduler.fake_host import Faults, TierLoop
from tests.scheduler.test_host_tier import (
    TierWorkload,
    check,
    recurrent_tier_workloads,
    tier_workloads,
)

RATE = 100.0
ROUNDING = 1e-6
TIERED = st.one_of(tier_workloads(), recurrent_tier_workloads())


class Begun(NamedTuple):
    """A load that has begun."""

    at: float
    size: int


def assert_bounded(loads: Ordered[Begun], rate: float) -> None:
    """In each window, loads take the rate times its seconds, and one load more."""
    for first, last in itertools.combinations(range(len(loads)), 2):
        window = loads[first : last + 1]
        most = rate * (window[-1].at - window[0].at) + max(load.size for load in window)
        assert sum(load.size for load in window) <= most + ROUNDING


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 1000), st.booleans()), min_size=1, max_size=40
    )
)
def test_any_loads_keep_the_rate_while_others_run(wishes: list[tuple[float, int, bool]]) -> None:
    """Each wish comes some seconds after the one before, with its bytes, beside others or not."""
    now, running, begun = 0.0, False, list[Begun]()
    pace = LoadPace(RATE, clock=lambda: now, others_run=lambda: running)
    for seconds, size, running in wishes:
        now += seconds
        if not running:
            assert pace.is_open(now), "it delays nobody"
        elif not pace.is_open(now):
            wait = pace.seconds(frozenset())
            assert 0 < wait < 1000 / RATE + ROUNDING, "of the largest load"
            now += wait + ROUNDING
            assert pace.is_open(now)
        pace.began(now, size)
        if running:
            begun.append(Begun(now, size))
    assert_bounded(begun, RATE)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_without_a_rate_nothing_waits(sizes: list[int]) -> None:
    pace = LoadPace(None, clock=lambda: 0.0, others_run=lambda: True)
    for size in sizes:
        pace.began(0.0, size)
        assert pace.is_open(0.0) and pace.seconds(frozenset()) == 0.0


@pytest.mark.parametrize("prefill_seconds", [0.3, None])
def test_a_wait_is_not_compared_with_computing_but_has_an_end(
    prefill_seconds: float | None,
) -> None:
    """Computing would delay the sequences for whose sake the load waits."""

    def decision(wait: float, seconds: float = 0.25) -> Decision:
        return Decision(100, 10, 10, seconds, prefill_seconds, wait)

    assert decision(0.5).pays and decision(MOST_WAIT).pays
    assert not decision(MOST_WAIT + 1).pays
    assert decision(0.5, seconds=0.35).pays == (prefill_seconds is None)


def test_a_load_refused_for_its_wait_says_nothing_about_the_link() -> None:
    config = HostTierConfig(slots=9, page_bytes=(9,), store_ring=4, load_ring=4, lookahead=2)
    rates = LoadRates(config)
    before = rates.seconds(10**9, 10**9)
    rates.refused(Decision(100, 10**9, 10**9, 0.25, 0.5, wait=MOST_WAIT + 1))
    assert rates.seconds(10**9, 10**9) == before
    rates.refused(Decision(100, 10**9, 10**9, 0.75, 0.5, wait=MOST_WAIT + 1))
    assert rates.seconds(10**9, 10**9) < before


def test_a_rate_is_above_0() -> None:
    with pytest.raises(ConfigError, match="load_rate must be positive"):
        HostTierConfig(
            slots=9, page_bytes=(9,), store_ring=4, load_ring=4, lookahead=2, load_rate=0.0
        )


def watched(tiered: TierWorkload) -> tuple[TierLoop, list[Begun]]:
    """Checks a workload, and returns the loads that began while others ran."""
    begun, begin = list[Begun](), Loads._begin  # pyright: ignore[reportPrivateUsage]

    def watch(loads: Loads, *args: Any) -> Load:
        load, pace = begin(loads, *args), loads.pace
        if pace._others_run():  # pyright: ignore[reportPrivateUsage]
            begun.append(Begun(load.began, len(load.pages)))
        return load

    with mock.patch.object(Loads, "_begin", watch):
        return check(tiered), begun


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(TIERED, st.sampled_from([3.0, 1.0, 10.0, 0.1]))
def test_each_request_gets_its_tokens_and_loads_keep_the_rate(
    tiered: TierWorkload, rate: float
) -> None:
    """All requests end, so none waits for ever. A page is a byte here."""
    _, begun = watched(tiered._replace(load_rate=rate))
    assert_bounded(begun, rate)


@pytest.mark.slow
@settings(
    max_examples=3000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(TIERED, st.sampled_from([3.0, 1.0, 10.0, 0.1]))
def test_loads_keep_the_rate_in_many_workloads(tiered: TierWorkload, rate: float) -> None:
    _, begun = watched(tiered._replace(load_rate=rate))
    assert_bounded(begun, rate)


PAGE, PAGES = 4, 5
PROMPTS = [(kind, 1, 2, 0) * PAGES for kind in range(4)]
TURN = 0.2
"""Seconds."""


class Restores:
    """A loop whose host has the pages of PROMPTS, which the device lacks."""

    def __init__(self, load_rate: float | None, *, prefill_rate: float | None = None):
        """`load_rate` is in pages per second. `prefill_rate`: what the scheduler believes."""
        self.loop = loop = TierLoop(
            SchedulerConfig(max_num_seqs=6, max_model_len=400, max_num_batched_tokens=64),
            CacheConfig(num_pages=100, page_size=PAGE),
            host_slots=400,
            ring=8,
            faults=Faults(late=0.0),
            load_rate=load_rate,
        )
        for number in range(len(PROMPTS)):
            self.ask(f"first {number}", number)
            self.until(f"first {number}")
        loop.drain()
        self.forget_device()
        loop.observer.tokens.clear()
        begin, tier = loop.tier.begin, loop.tier
        known = prefill_rate
        tier.begin = lambda seq, cached, prefill_rate: begin(seq, cached, known)

    def forget_device(self) -> None:
        for pool in self.loop.scheduler.pools:
            pool.forget()

    def ask(self, name: str, number: int, *tail: int) -> None:
        """Adds a request whose pages the host has."""
        self.add(name, (*PROMPTS[number], 3, *tail), max_tokens=1)

    def stream(self) -> None:
        """From now on a sequence decodes."""
        self.add("stream", (3,), max_tokens=200)
        self.turn()

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.loop.add(Request(id=name, prompt=prompt, params=params))

    def turn(self) -> None:
        self.loop.launch()
        while self.loop.in_flight:
            self.loop.commit()

    def until(self, *names: str) -> list[float]:
        """Runs until the requests have ended. Returns the seconds that each took."""
        began, ends = self.loop.now, dict[str, float]()
        for _ in range(400):
            ends |= dict.fromkeys(self.loop.over - ends.keys(), self.loop.now - began)
            if ends.keys() >= {*names}:
                return [ends[name] for name in names]
            self.turn()
        raise AssertionError("no progress")

    @property
    def loads(self) -> int:
        return len(self.loop.observer.loaded)


def test_where_nobody_runs_loads_begin_at_once() -> None:
    restores = Restores(load_rate=1.0)
    for repeat in range(3):
        restores.forget_device()
        names = [f"{repeat}: {number}" for number in range(3)]
        for number, name in enumerate(names):
            restores.ask(name, number)
        assert max(restores.until(*names)) < 5 * TURN
    assert restores.loads == 9 and not restores.loop.observer.paced


def test_beside_a_stream_they_take_turns_and_hold_up_nobody_else() -> None:
    restores = Restores(load_rate=5.0)  # a second for each
    restores.stream()
    for number in range(3):
        restores.ask(f"{number}", number)
    restores.turn()
    assert restores.loop.tier.usage().loading == 3, "with the load or without"
    restores.add("new", (3, 3, 3), max_tokens=1)
    new, first, second, third = restores.until("new", "0", "1", "2")
    assert new < 3 * TURN
    assert second - first == pytest.approx(1.0, abs=2 * TURN)
    assert third - second == pytest.approx(1.0, abs=2 * TURN)
    assert restores.loop.observer.paced == pytest.approx(1.0 + 2.0, abs=4 * TURN)
    assert restores.loads == 3


def test_a_stream_does_not_wait_for_what_was_loaded_before_it_came() -> None:
    """Loads beside nobody do not add up: the next one waits for one of them."""
    restores = Restores(load_rate=5.0)
    for repeat in range(5):
        restores.forget_device()
        restores.ask(f"alone {repeat}", 0)
        restores.until(f"alone {repeat}")
    restores.stream()
    restores.ask("beside", 1)
    assert restores.until("beside")[0] < 1.0 + 5 * TURN


def test_a_prefix_whose_turn_comes_too_late_is_computed() -> None:
    restores = Restores(load_rate=5.0 / (0.6 * MOST_WAIT), prefill_rate=0.1)
    restores.stream()
    for number in range(3):
        restores.ask(f"{number}", number)
    ends = restores.until("0", "1", "2")
    assert ends[2] < 1.0 < ends[1], "the third would wait for 1.2 times the most"
    assert restores.loop.observer.tokens == {"host": 2 * len(PROMPTS[0])}


def test_others_wait_although_computing_would_end_sooner() -> None:
    restores = Restores(load_rate=5.0, prefill_rate=len(PROMPTS[0]) / 1.5)
    restores.stream()
    for number in range(3):
        restores.ask(f"{number}", number)
    assert max(restores.until("0", "1", "2")) > 2.0
    assert restores.loads == 3


def test_when_nobody_runs_any_more_the_next_load_begins() -> None:
    restores = Restores(load_rate=1.5)
    restores.stream()
    for number in range(2):
        restores.ask(f"{number}", number)
    restores.until("0")
    restores.loop.abort("stream")
    assert restores.until("1")[0] < 5 * TURN
    assert restores.loads == 2


def test_who_needs_pages_that_another_waits_for_joins_its_load() -> None:
    """It costs those behind it no wait."""
    restores = Restores(load_rate=5.0, prefill_rate=len(PROMPTS[0]) / 2.5)
    restores.stream()
    restores.ask("first", 0)
    for name in ("waits", "joins", "joins too"):
        restores.ask(name, 1, len(name) % 4)
    restores.ask("last", 2)
    ends = restores.until("first", "waits", "joins", "joins too", "last")
    assert max(ends[1:4]) - min(ends[1:4]) <= 2 * TURN
    assert ends[4] - ends[3] == pytest.approx(1.0, abs=2 * TURN)
    assert restores.loads == 3


def test_the_turn_of_a_request_that_was_aborted_is_the_next_one_s() -> None:
    restores = Restores(load_rate=5.0)
    restores.stream()
    for number in range(3):
        restores.ask(f"{number}", number)
    restores.turn()
    restores.loop.abort("1")
    first, last = restores.until("0", "2")
    assert last - first == pytest.approx(1.0, abs=2 * TURN)


def test_who_waits_for_a_load_that_fails_is_not_forgotten() -> None:
    """Whoever should have joined the load has its own."""
    restores = Restores(load_rate=5.0)
    restores.stream()
    restores.ask("aborted", 0)
    restores.turn()
    restores.ask("waits", 0, 1)
    restores.ask("behind", 1)
    restores.loop.abort("aborted")
    restores.until("waits", "behind")
    assert restores.loop.tier.usage().loading == 0


def test_who_waits_computes_if_the_host_has_forgotten_its_pages() -> None:
    restores = Restores(load_rate=1.5)
    restores.stream()
    for number in range(2):
        restores.ask(f"{number}", number)
    restores.until("0")
    restores.loop.scheduler.reset_prefix_cache()
    assert restores.until("1")[0] < 5 * TURN
    assert restores.loads == 1


def test_a_load_has_its_time_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn comes later than a load may take."""
    monkeypatch.setattr(loading, "_TIMEOUT", 2.0)
    restores = Restores(load_rate=5.0 / 4.0, prefill_rate=0.1)
    restores.stream()
    for number in range(2):
        restores.ask(f"{number}", number)
    assert restores.until("1")[0] > 4.0
    assert restores.loads == 2 and not restores.loop.observer.recomputed
