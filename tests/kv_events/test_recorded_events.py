"""Events that a scheduler tells: none contradicts those before it, and together they are its pages.

`Index` asserts on the way that no page is stored twice, that every parent is there, that a removal
matches and takes no page away that others follow.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.events import Cleared, Removed, Stored
from jaxserve.kv_events.wire import number_of
from jaxserve.plan import StepPlan
from jaxserve.scheduler import Scheduler
from tests.kv_events.router import Index
from tests.kv_events.watch import Watch, check_predictions
from tests.scheduler.by_hand import commit, planned, request
from tests.scheduler.loop import Loop
from tests.scheduler.test_scheduler_properties import Workload, play, windowed_workloads, workloads


class EventLoop(Loop):
    """Checks that a page is told of only when the device has written it, and never half."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, **options: Any):
        self.watch = Watch(self._told)
        self.planning = False
        self.plans: dict[int, int] = {}
        """How many plans had to be collected before an event may be told."""
        super().__init__(config, cache, cache_events=self.watch.sink, **options)
        self.watch.follow(self.scheduler)
        events: Any = self.scheduler._kv_cache._events  # pyright: ignore[reportPrivateUsage]
        self._stored, events.stored = events.stored, self._note

    def _note(self, stored: Stored) -> None:
        self.plans[id(stored)] = self.runner.launched + self.planning
        self._stored(stored)

    def launch(self) -> StepPlan | None:
        self.planning = True
        plan = super().launch()
        self.planning = False
        return plan

    def _told(self, events: list[Any]) -> None:
        if not hasattr(self, "runner"):
            assert events == [Cleared()]  # of the start
            return
        pools = self.scheduler.pools
        for stored in events:
            if not isinstance(stored, Stored):
                continue
            assert self.cache.page_size * len(stored.hashes) == len(stored.tokens)
            for content in stored.hashes:
                page = pools[stored.group or 0].page_of(content)
                windowed = self.runner.windows[stored.group or 0] is not None
                if page is not None and not (self.cache.own_tokens and windowed):
                    assert None not in self.runner.kv[stored.group or 0][page], "half a page"
            assert self.plans.pop(id(stored)) <= self.runner.collected, "it is not written yet"

    def fail(self) -> None:
        self.watch.failed()
        super().fail()


def check(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[EventLoop] = []

    def loop(*args: Any, **options: Any) -> EventLoop:
        loops.append(EventLoop(*args, **options))
        return loops[0]

    monkeypatch.setattr("tests.scheduler.test_scheduler_properties.Loop", loop)
    play(work)
    watch, pools = loops[0].watch, loops[0].scheduler.pools
    windows = [group.window for group in work.cache.groups]
    index = Index(page_size=work.cache.page_size, windows=windows, own=work.cache.own_tokens)
    found = check_predictions(watch, index, exact=None in windows)
    published = [{number_of(each) for each in pool._page_of} for pool in pools]  # pyright: ignore[reportPrivateUsage]
    assert index.names == published, "the index is not the pool's own table"
    event(f"found: {found > 0}")
    event(f"admitted again: {any(each.again for each in watch.admissions)}")
    removed = any(isinstance(each, Removed) for batch in watch.batches for each in batch)
    event(f"removed: {removed}")


relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@settings(relaxed, max_examples=300)
@given(work=workloads())
def test_events_predict_every_admission(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    check(work, monkeypatch)


@settings(relaxed, max_examples=300)
@given(work=windowed_workloads())
def test_with_windows_events_predict_every_admission(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(work, monkeypatch)


@pytest.mark.slow
@settings(relaxed, max_examples=10_000)
@given(work=st.one_of(workloads(), windowed_workloads()))
def test_events_predict_every_admission_in_many_workloads(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(work, monkeypatch)


# By example, with pages of two tokens.


def scheduler(watch: Watch, *, pages: int = 65, **config: Any) -> Scheduler:
    settings = SchedulerConfig(
        max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64, **config
    )
    made = Scheduler(settings, CacheConfig(num_pages=pages, page_size=2), cache_events=watch.sink)
    watch.follow(made)
    return made


def told(watch: Watch) -> list[str]:
    """The events since the start, in short: S, R or C with the number of pages."""
    events = [each for batch in watch.batches[1:] for each in batch]
    return [
        "C" if isinstance(each, Cleared) else f"{type(each).__name__[0]}{len(each.hashes)}"
        for each in events
    ]


def run(sched: Scheduler, name: str, prompt: tuple[int, ...], *, salt: str = "") -> None:
    """A request of one token, alone."""
    params = SamplingParams(max_tokens=1)
    sched.add(Request(id=name, prompt=prompt, params=params, cache_salt=salt))
    commit(sched, planned(sched))


def test_the_start_tells_that_nothing_is_cached() -> None:
    watch = Watch()
    scheduler(watch)
    assert watch.batches == [[Cleared()]]


def test_whole_pages_are_told_and_not_again() -> None:
    sched = scheduler(watch := Watch())
    run(sched, "a", (1, 2, 3, 4, 5))
    run(sched, "again", (1, 2, 3, 4, 5))
    run(sched, "longer", (1, 2, 3, 4, 5, 6, 7))
    assert told(watch) == ["S2", "S1"]
    first, second = (each for batch in watch.batches[1:] for each in batch)
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert (first.parent, first.tokens) == (None, [1, 2, 3, 4])
    assert (second.parent, second.tokens) == (first.hashes[1], [5, 6])


def test_nothing_is_told_before_the_step_is_committed() -> None:
    sched = scheduler(watch := Watch())
    sched.add(request("a", 7, max_tokens=4))
    first, second = planned(sched), planned(sched)
    assert told(watch) == []
    commit(sched, first, 5)
    assert told(watch) == ["S3"]
    commit(sched, second, 6)  # its fourth page got its last token from the first step
    assert told(watch) == ["S3", "S1"]


def test_what_a_failed_step_would_have_filled_is_not_told() -> None:
    sched = scheduler(watch := Watch())
    run(sched, "a", (1, 2, 3))
    sched.add(request("b", 7, max_tokens=4))
    plan: StepPlan = planned(sched)
    sched.fail([plan])
    assert told(watch) == ["S1", "C"]


def test_evictions_are_told_before_what_takes_their_place() -> None:
    sched = scheduler(watch := Watch(), pages=6)
    run(sched, "a", (1, 2, 3, 4, 5))
    run(sched, "b", (6, 7, 8, 9, 10, 11, 12))
    assert told(watch) == ["S2", "R1", "S3"]
    removed = watch.batches[2][0]
    stored = watch.batches[1][0]
    assert isinstance(removed, Removed) and isinstance(stored, Stored)
    assert removed.hashes == stored.hashes[1:], "the prefix stays longest"


def test_new_weights_clear_everything_and_sequences_that_go_on_tell_nothing() -> None:
    sched = scheduler(watch := Watch())
    sched.add(request("a", 5, max_tokens=8))
    commit(sched, planned(sched), 5)
    sched.reset_prefix_cache()
    while plan := sched.plan():
        commit(sched, plan, 5)
    assert told(watch) == ["S2", "C"]
    run(sched, "b", (1, 1, 1))
    assert told(watch) == ["S2", "C", "S1"]


def test_a_sequence_that_is_preempted_after_new_weights_is_found_by_new_requests() -> None:
    sched = scheduler(watch := Watch())
    sched.add(Request(id="a", prompt=(1, 2, 3, 4, 5), params=SamplingParams(max_tokens=2)))
    commit(sched, planned(sched), 5)
    sched.reset_prefix_cache()
    sched.restart()
    while plan := sched.plan():
        commit(sched, plan, 5)
    run(sched, "b", (1, 2, 3, 4, 5))
    assert watch.admissions[-1].found == 4
    check_predictions(watch, Index(page_size=2))


def test_a_reset_of_an_empty_cache_is_not_told() -> None:
    sched = scheduler(watch := Watch())
    sched.reset_prefix_cache()
    run(sched, "a", (1, 2, 3))
    sched.reset_prefix_cache()
    sched.reset_prefix_cache()
    assert told(watch) == ["S1", "C"]


def test_without_prefix_caching_nothing_is_told() -> None:
    sched = scheduler(watch := Watch(), prefix_caching=False)
    run(sched, "a", (1, 2, 3))
    assert told(watch) == []
