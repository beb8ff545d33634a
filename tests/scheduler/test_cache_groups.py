"""Cache groups with windows: which pages a sequence holds, and what a prefix hit needs."""

from __future__ import annotations

from jaxserve.config import CacheConfig, PagedGroup, SchedulerConfig
from jaxserve.scheduler import Scheduler
from tests.scheduler.by_hand import assert_empty, commit, planned, request, shape
from tests.scheduler.loop import Optimist


def scheduler(*, full: int | None, windows: tuple[tuple[int, int], ...]) -> Scheduler:
    """With pages of 2 tokens, chunks of up to 8, and groups of (usable pages, window)."""
    groups = [PagedGroup(num_pages=pages + 1, window=window) for pages, window in windows]
    if full is not None:
        groups.insert(0, PagedGroup(num_pages=full + 1))
    first, *further = groups
    cache = CacheConfig(
        num_pages=first.num_pages, window=first.window, further=tuple(further), page_size=2
    )
    config = SchedulerConfig(max_num_seqs=4, max_model_len=64, max_num_batched_tokens=8)
    return Scheduler(config, cache, lengths=Optimist(), clock=lambda: 1.0)


def run(sched: Scheduler, name: str, prompt: int, max_tokens: int) -> None:
    sched.add(request(name, prompt, max_tokens=max_tokens))
    while sched.has_work:
        commit(sched, planned(sched))


def test_pages_behind_the_window_are_free_while_the_sequence_runs() -> None:
    sched = scheduler(full=32, windows=[(8, 5)])
    sched.add(request("a", 20, max_tokens=20))
    for start in (0, 8, 16):
        plan = planned(sched)
        assert shape(plan) == [(0, start, min(8, 20 - start))]
        commit(sched, plan)
    full, window = sched.pools
    while sched.has_work:
        held = window.num_total - window.num_free
        assert held <= 6, "the window, and what a chunk fills"
        assert full.num_free <= 32 - 10
        commit(sched, planned(sched))
    assert window.num_free == 8
    assert_empty(sched, pages=32)


def test_a_pool_of_one_window_serves_a_prompt_that_is_much_longer() -> None:
    sched = scheduler(full=None, windows=[(3, 5)])
    sched.add(request("a", 40, max_tokens=10))
    starts: list[int] = []
    while sched.has_work:
        plan = planned(sched)
        starts += [row.start for row in plan.rows if row.tokens]
        commit(sched, plan)
    assert len(starts) > 10, "chunks take the pages that are free"
    assert sched.num_preemptions == 0


def test_chunks_of_two_sequences_share_a_pool_that_one_fills() -> None:
    sched = scheduler(full=None, windows=[(4, 5)])
    sched.add(request("a", 12, max_tokens=12))
    sched.add(request("b", 30, max_tokens=4))
    steps = 0
    while sched.has_work:
        commit(sched, planned(sched))
        steps += 1
    assert steps < 60
    assert_empty(sched, pages=4)


def test_a_hit_needs_of_a_window_only_what_it_covers() -> None:
    sched = scheduler(full=32, windows=[(6, 5)])
    run(sched, "a", 20, 2)
    full, window = sched.pools
    assert full.num_published == 10
    assert window.num_published < 10, "first pages of the window were given out again"
    sched.add(request("b", 20, max_tokens=2))
    plan = planned(sched)
    assert shape(plan) == [(1, 18, 2)], "all but the last page"
    assert {entry.position for entry in plan.pages if entry.group == 1} == {7, 8, 9}
    assert {entry.position for entry in plan.pages if entry.group == 0} == set(range(10))


def test_a_hit_ends_where_every_group_has_what_it_needs() -> None:
    sched = scheduler(full=32, windows=[(16, 3), (16, 5)])
    run(sched, "a", 20, 2)
    full, narrow, wide = sched.pools
    hashes = sched._live  # nobody is left
    assert not hashes
    contents = list(narrow._hash_of.values())  # pyright: ignore[reportPrivateUsage]
    lost = contents[8]  # of page 8, without which nobody goes on at page 9
    page = narrow._page_of.pop(lost)  # pyright: ignore[reportPrivateUsage]
    del narrow._hash_of[page]  # pyright: ignore[reportPrivateUsage]
    sched.add(request("b", 20, max_tokens=2))
    assert shape(planned(sched)) == [(1, 16, 4)]
    assert wide.num_published == full.num_published == 10


def test_each_pool_reports_the_pages_that_it_gives_out_again() -> None:
    sched = scheduler(full=32, windows=[(4, 5)])
    evicted: list[tuple[int, int]] = []
    for group, pool in enumerate(sched.pools):
        pool.on_evict.append(lambda page, content, group=group: evicted.append((group, page)))
    run(sched, "a", 30, 2)
    assert evicted and {group for group, _ in evicted} == {1}


def test_no_group_keeps_what_earlier_weights_computed() -> None:
    sched = scheduler(full=32, windows=[(8, 5)])
    run(sched, "a", 12, 2)
    assert all(pool.num_published for pool in sched.pools)
    sched.reset_prefix_cache()
    assert not any(pool.num_published for pool in sched.pools)


def test_the_fullest_group_says_how_full_the_cache_is() -> None:
    sched = scheduler(full=64, windows=[(8, 5)])
    assert sched.pages is sched.pools[0]
    sched.add(request("a", 12, max_tokens=4))
    commit(sched, planned(sched))
    full, window = sched.pools
    assert window.num_free / window.num_total < full.num_free / full.num_total
    assert sched.pages is window
