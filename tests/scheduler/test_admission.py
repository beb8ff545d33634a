"""What the running sequences are expected to need."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.admission import Growth, OutputLengths, margin, peak_pages

growths = st.lists(
    st.builds(Growth, st.integers(0, 20), st.integers(0, 20), st.just(0.0)), max_size=8
)


@given(growths)
def test_the_peak_is_the_most_that_is_held_at_any_time(sequences: list[Growth]) -> None:
    held = [sum(seq.held + now for seq in sequences if seq.remaining >= now) for now in range(21)]
    assert peak_pages(sequences) == max(held)


def test_lengths_are_learned_per_class() -> None:
    lengths = OutputLengths()
    assert lengths.expected(100, 0) == (100, 0.0)
    for _ in range(100):
        lengths.observe(100, 25)
        lengths.observe(2000, 2000)
    assert lengths.expected(100, 0) == (25, 0.0)
    assert lengths.expected(2000, 0) == (2000, 0.0)
    assert lengths.expected(100, 60) == (75, 0.0), "longer than usual"
    assert lengths.expected(100, 99) == (100, 0.0)


def test_the_deviation_of_lengths_is_learned() -> None:
    lengths = OutputLengths()
    for number in range(1000):
        lengths.observe(100, 20 + 40 * (number % 2))
    expected, deviation = lengths.expected(100, 0)
    assert 38 <= expected <= 42 and 18 <= deviation <= 22
    assert lengths.of_new(100) == (expected, deviation, int(expected - deviation))
    assert lengths.of_new(1000).short == 0


def test_uncertain_lengths_leave_a_margin() -> None:
    assert margin([Growth(4, 2)] * 4) == 0
    assert margin([Growth(4, 2, deviation=3.0)] * 4) == 6


def test_before_anything_is_known_a_request_for_everything_does_not_reserve_everything() -> None:
    assert OutputLengths().expected(30_000, 0) == (2048, 0.0)


class Pessimist(OutputLengths):
    """Is so unsure that no margin is enough."""

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        return max_tokens, 1e9


@given(
    pages=st.integers(1, 40),
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(2, 30)), min_size=1, max_size=6),
)
def test_who_fits_at_the_longest_that_all_may_become_is_not_kept_waiting(
    pages: int, requests: list[tuple[int, int]]
) -> None:
    config = SchedulerConfig(max_num_seqs=6, max_model_len=64, max_num_batched_tokens=512)
    cache = CacheConfig(num_pages=1 + pages, page_size=4)
    scheduler = Scheduler(config, cache, lengths=Pessimist())
    taken = 0
    for number, (prompt, output) in enumerate(requests):
        most = -(-(prompt + output - 1) // cache.page_size)
        if taken + most > pages:
            break
        taken += most
        params = SamplingParams(max_tokens=output)
        scheduler.add(Request(id=str(number), prompt=(number,) * prompt, params=params))
    scheduler.plan()
    assert scheduler.num_waiting == 0
    scheduler.check()


class Share(OutputLengths):
    """Expects a part of what is asked for, exactly."""

    part = 0.1

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        return max(int(self.part * max_tokens), generated + 1), 0.0


def test_an_answer_that_ends_before_the_pages_get_scarce_is_not_kept_waiting() -> None:
    config = SchedulerConfig(max_num_seqs=6, max_model_len=200, max_num_batched_tokens=64)
    lengths = Share()
    scheduler = Scheduler(config, CacheConfig(num_pages=61, page_size=4), lengths=lengths)

    def come(name: str, output: int) -> None:
        params = SamplingParams(max_tokens=output)
        scheduler.add(Request(id=name, prompt=(len(name), *range(7)), params=params))

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [Sampled(7) if row.samples else None for row in plan.rows])

    come("one", 150)
    come("another", 150)
    step()
    assert scheduler.num_running == 2
    lengths.part = 1.0  # they will need 78 of 60 pages
    step()
    come("long", 100)
    step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.abort("long")
    come("short", 8)
    step()
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 0)


def test_a_steady_overload_preempts_few() -> None:
    """Sixteen times the load that fits, with ends that nobody can know."""
    config = SchedulerConfig(max_num_seqs=64, max_model_len=1024, max_num_batched_tokens=512)
    scheduler = Scheduler(config, CacheConfig(num_pages=257, page_size=16))
    rng = random.Random(0)
    ends: dict[str, int] = {}
    number = finished = steps = 0
    used = 0.0
    while finished < 600:
        while scheduler.num_waiting < 20:
            most, share = rng.choice([(128, 0.3), (512, 0.6), (256, 1.0)])
            name = f"r{number}"
            ends[name] = max(1, min(most, round(rng.gauss(share, 0.2) * most)))
            prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(8, 300)))
            scheduler.add(Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=most)))
            number += 1
        plan = scheduler.plan()
        assert plan is not None
        steps, used = steps + 1, used + 1 - scheduler.pages.num_free / 256
        events = scheduler.commit(plan, [Sampled(7) if row.samples else None for row in plan.rows])
        for event in events:
            ends[event.request_id] -= 1
            if event.finish is not None:
                finished += 1
            elif not ends[event.request_id]:
                scheduler.abort(event.request_id)  # as the server does at a stop string
                finished += 1
    assert scheduler.num_preemptions < 0.05 * finished
    assert used > 0.75 * steps, "the cache is not used"
