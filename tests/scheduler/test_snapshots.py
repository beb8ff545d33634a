"""Snapshots of recurrent state: what is found, what it costs, and that it is the right state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import KeptState, StateCopy
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.snapshots import Snapshots
from lab.studies import bench_hybrid_hits
from lab.studies.bench_hybrid_hits import Planner
from tests.scheduler.by_hand import PLAIN, commit, planned, shape
from tests.scheduler.loop import Optimist
from tests.scheduler.test_scheduler_properties import (
    Workload,
    check_against_solo,
    windowed_workloads,
    workloads,
)

SLOTS = 2
FIRST = SLOTS + 1
"""The first slot of a snapshot."""


def scheduler(
    *,
    snapshots: int = 4,
    pages: int = 32,
    stride: int = 16,
    block: int = 1,
    tokens: int = 64,
    own_tokens: int = 0,
    most_prompts: int = 16,
) -> Scheduler:
    """With pages of 4 tokens."""
    config = SchedulerConfig(max_num_seqs=SLOTS, max_model_len=128, max_num_batched_tokens=tokens)
    cache = CacheConfig(
        num_pages=pages + 1,
        page_size=4,
        snapshots=snapshots,
        snapshot_stride=stride,
        own_tokens=own_tokens,
        state_block=block,
        most_prompts=most_prompts,
    )
    return Scheduler(config, cache, lengths=Optimist(), clock=lambda: 1.0)


def prompt(*tokens: int, name: str = "a", max_tokens: int = 1) -> Request:
    return Request(id=name, prompt=tokens, params=SamplingParams(max_tokens=max_tokens))


def run(sched: Scheduler, request: Request) -> int:
    """Returns how many tokens were cached."""
    sched.add(request)
    cached = -1
    while sched.has_work:
        for event in commit(sched, planned(sched)):
            cached = max(cached, event.cached_tokens)
    return cached


def test_a_chunk_stores_the_state_at_one_boundary_and_ends_before_it_reaches_a_second() -> None:
    sched = scheduler()
    sched.add(prompt(*range(39)))
    plans = []
    while sched.has_work:
        plans.append(planned(sched))
        commit(sched, plans[-1])
    assert [shape(plan) for plan in plans] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 7)]]
    stored = [row.kept for plan in plans for row in plan.rows]
    assert stored == [KeptState(16, FIRST), KeptState(16, FIRST + 1), KeptState(4, FIRST + 2)]
    assert not any(plan.states for plan in plans)


def test_equal_prompts_of_one_step_leave_one_snapshot() -> None:
    sched = scheduler(stride=64)
    for name in ("one", "another"):
        sched.add(prompt(*range(11), name=name))
    plan = planned(sched)
    assert [row.kept for row in plan.rows] == [KeptState(8, FIRST), KeptState(8, FIRST + 1)]
    commit(sched, plan)
    assert run(sched, prompt(*range(11), name="again")) == 8
    snapshots = sched._kv_cache.snapshots  # pyright: ignore[reportPrivateUsage]
    assert snapshots is not None
    snapshots.settle()
    assert snapshots.num_kept == 1
    snapshots.check()


def test_a_hit_ends_at_the_longest_snapshot_and_brings_its_state_back() -> None:
    sched = scheduler()
    run(sched, prompt(*range(39)))
    sched.add(prompt(*range(39), name="again"))
    plan = planned(sched)
    assert shape(plan) == [(1, 36, 3)]
    assert plan.states == (StateCopy(FIRST + 2, plan.rows[0].slot),)
    commit(sched, plan)
    assert run(sched, prompt(*range(30), name="shorter")) == 16
    assert run(sched, prompt(*range(12), name="below all")) == 0


def test_the_next_turn_goes_on_from_the_last_prompt() -> None:
    """Its output was computed token by token, and the next turn alone computes it in blocks."""
    sched = scheduler()
    run(sched, prompt(*range(10), max_tokens=20))
    history = (*range(10), *[PLAIN] * 20)
    assert run(sched, prompt(*history, 7, 7, 7, name="next")) == 8
    assert run(sched, prompt(*history, 7, 7, 7, 7, name="after it")) == 32


def test_chunks_and_snapshots_end_at_blocks() -> None:
    sched = scheduler(block=8)
    sched.add(prompt(*range(30)))
    plans = []
    while sched.has_work:
        plans.append(planned(sched))
        commit(sched, plans[-1])
    assert [shape(plan) for plan in plans] == [[(0, 0, 16)], [(0, 16, 14)]]
    assert plans[1].rows[0].kept == KeptState(8, FIRST + 1)
    assert run(sched, prompt(*range(30), name="again")) == 24
    assert run(sched, prompt(*range(23), name="shorter")) == 16


def starts_and_lengths(sched: Scheduler) -> list[list[tuple[int, int]]]:
    """Of the rows of each step."""
    found = []
    while sched.has_work:
        plan = planned(sched)
        found.append([(row.start, row.num_tokens) for row in plan.rows])
        commit(sched, plan)
    return found


def test_a_step_without_room_for_a_block_reads_no_prompt() -> None:
    """Nor does one without room for a prompt's last block, which is shorter."""
    sched = scheduler(stride=64, block=32, tokens=40)
    sched.add(prompt(*range(70)))
    sched.add(prompt(*range(200, 235), name="second"))
    assert starts_and_lengths(sched) == [[(0, 32)], [(32, 38)], [(0, 35)]]
    sched = scheduler(stride=64, block=32, tokens=40)
    sched.add(prompt(*range(52)))
    sched.add(prompt(*range(200, 230), name="second"))
    assert starts_and_lengths(sched) == [[(0, 32)], [(32, 20)], [(0, 30)]]


@pytest.mark.parametrize(("most", "steps"), [(1, [1, 1]), (2, [2])])
def test_a_step_advances_a_limited_number_of_prompts(most: int, steps: list[int]) -> None:
    sched = scheduler(most_prompts=most)
    sched.add(prompt(*range(8)))
    sched.add(prompt(*range(50, 58), name="second"))
    assert [len(rows) for rows in starts_and_lengths(sched)] == steps


def test_the_least_recently_used_makes_room_and_one_goes_with_its_page() -> None:
    sched = scheduler(snapshots=2)
    for first in (0, 50, 100):
        run(sched, prompt(*range(first, first + 10), name=str(first)))
    assert run(sched, prompt(*range(10), name="oldest")) == 0
    assert run(sched, prompt(*range(100, 110), name="newest")) == 8
    sched = scheduler(snapshots=8, pages=8)
    run(sched, prompt(*range(10)))
    run(sched, prompt(*range(40, 71), name="takes all pages"))
    snapshots = sched._kv_cache.snapshots  # pyright: ignore[reportPrivateUsage]
    assert snapshots is not None
    snapshots.settle()
    assert snapshots.num_kept == 2, "only those of the second"


def test_a_hit_is_admitted_only_if_the_step_holds_a_block_of_its_own_tokens() -> None:
    sched = scheduler(own_tokens=8, block=4, tokens=9)
    run(sched, prompt(*range(14), name="fills"))
    for name in ("first", "second"):
        sched.add(prompt(*range(14), name=name))
    plan = planned(sched)  # eight own tokens of the first leave one, less than a block
    assert [each.slot for each in plan.admissions] == [row.slot for row in plan.rows]
    assert len(plan.rows) == 1


def test_a_hit_behind_own_tokens_gets_its_state_when_those_are_computed() -> None:
    sched = scheduler(own_tokens=8)
    run(sched, prompt(*range(39)))
    sched.add(prompt(*range(39), name="again"))
    first = planned(sched)
    commit(sched, first)
    assert shape(first) == [(1, 0, 8)] and not first.states
    second = planned(sched)
    commit(sched, second)
    assert shape(second) == [(1, 36, 3)]
    assert second.states == (StateCopy(FIRST + 2, second.rows[0].slot),)


def sequence(number: int, first: int) -> Sequence:
    """Of 9 tokens, with pages of 4."""
    request = prompt(*range(first, first + 9), name=str(number))
    root = bytes(32)
    made = Sequence.of(request, seq_id=number, limit=64, level=0, root=root, now=0.0, ttft_slo=None)
    made.slot, made.prefill_end = number, 9
    return made


@pytest.mark.parametrize("dropped", [False, True])
def test_a_snapshot_that_a_hit_waits_for_is_not_given_out(dropped: bool) -> None:
    snapshots = Snapshots(1, first_slot=FIRST, stride=4, page_size=4)
    one, again, two = sequence(0, 10), sequence(1, 10), sequence(2, 50)

    def reach(seq: Sequence, computed: int) -> tuple[KeptState | None, tuple[StateCopy, ...]]:
        """What a chunk stores, and the copies of the plan after it."""
        start, seq.computed = seq.computed, computed
        kept = snapshots.planned(seq, start)
        snapshots.check()
        snapshots.settle()
        snapshots.check()
        return kept, snapshots.take_copies()

    one.computed = 4
    assert reach(one, 8) == (KeptState(4, FIRST), ())
    content = again.page_hashes(2, 4)[-1]
    again.skip_from, again.skip_to = 4, 8
    snapshots.restore_later(content, again)
    if dropped:
        snapshots.drop(content)
    assert reach(again, 2) == (None, ()) == reach(two, 4), "nothing is free"
    again.skip_from = again.skip_to = 0
    assert reach(again, 8) == (None, (StateCopy(FIRST, 1),))
    assert reach(two, 8) == (KeptState(4, FIRST), ())


def test_a_sequence_that_ends_before_its_state_comes_back_leaves_nothing() -> None:
    snapshots = Snapshots(1, first_slot=FIRST, stride=4, page_size=4)
    one, again = sequence(0, 10), sequence(1, 10)
    one.computed = 8
    snapshots.planned(one, 4)
    snapshots.settle()
    again.skip_from, again.skip_to = 4, 8
    snapshots.restore_later(again.page_hashes(2, 4)[-1], again)
    snapshots.forget()
    again.skip_to, again.computed = 0, 8
    snapshots.planned(again, 4, publishes=False)
    snapshots.freed(again)
    snapshots.settle()
    snapshots.check()
    assert snapshots.take_copies() == () and snapshots.num_kept == 0


def test_nothing_is_found_after_a_reset() -> None:
    sched = scheduler()
    run(sched, prompt(*range(39)))
    sched.reset_prefix_cache()
    assert run(sched, prompt(*range(39), name="again")) == 0


def test_a_snapshot_is_taken_where_a_prompt_leaves_another() -> None:
    """Neither of the first two has it at their common beginning; the second one makes it."""
    sched = scheduler(stride=64, block=8)
    run(sched, prompt(*range(30), *range(40, 60)))
    sched.add(prompt(*range(30), *range(70, 90), name="leaves it"))
    shapes = []
    while sched.has_work:
        plan = planned(sched)
        shapes += shape(plan)
        commit(sched, plan)
    assert shapes == [(1, 0, 24), (1, 24, 26)]
    assert run(sched, prompt(*range(30), *range(100, 120), name="finds it")) == 24


def test_a_lost_end_of_a_prompt_is_no_junction() -> None:
    """Its pages are there, and the next turn alone wants them: a snapshot would be one too many."""
    sched = scheduler(snapshots=1)
    run(sched, prompt(*range(11), name="first turn"))
    run(sched, prompt(*range(50, 61), name="takes its place"))
    sched.add(prompt(*range(19), name="next turn"))
    first = planned(sched)
    commit(sched, first)
    assert shape(first) == [(2, 0, 19)]


def test_the_end_of_a_turn_makes_room_when_the_next_turn_has_its_own() -> None:
    sched = scheduler(snapshots=2, stride=64)
    run(sched, prompt(*range(100, 111), name="another chat"))
    run(sched, prompt(*range(11), name="a turn"))
    run(sched, prompt(*range(19), name="its next turn"))
    run(sched, prompt(*range(27), name="and the next"))
    assert run(sched, prompt(*range(100, 111), name="another chat again")) == 8


def test_snapshots_of_the_stride_make_room_first() -> None:
    sched = scheduler(snapshots=4)
    run(sched, prompt(*range(100, 111), name="a short chat"))
    run(sched, prompt(*range(70), name="one with four of the stride"))
    assert run(sched, prompt(*range(100, 111), name="the short chat again")) == 8
    assert run(sched, prompt(*range(70), name="the long one again")) == 68


@pytest.mark.parametrize("snapshots", [14, 200])
def test_turns_of_agents_are_found(snapshots: int) -> None:
    """9 of 10 tokens that an ideal cache has, with little more snapshots than conversations."""
    found = bench_hybrid_hits.hits(
        bench_hybrid_hits.play(Planner(snapshots), bench_hybrid_hits.TRACE, 10, 5)
    )
    assert found["cached_over_ideal"] >= 0.9, found


@st.composite
def snapshot_workloads(draw: st.DrawFn) -> Workload:
    """Scarce snapshots, often of every page, with windows beside layers without one or not, and
    blocks smaller or larger than pages."""
    work = draw(st.one_of(workloads(), windowed_workloads()))
    size = work.cache.page_size
    room = work.config.max_num_batched_tokens - work.config.max_num_seqs + 1
    most = min(room, size if any(group.window for group in work.cache.groups) else 4 * size)
    block = draw(st.sampled_from([each for each in (1, 2, 4, 8, 16) if each <= most] or [1]))
    cache = replace(
        work.cache,
        own_tokens=work.cache.own_tokens if work.cache.own_tokens % block == 0 else 0,
        snapshots=draw(st.sampled_from([4, 2, 1, 9])),
        snapshot_stride=max(size, block) * draw(st.sampled_from([1, 2, 4])),
        state_block=block,
        most_prompts=draw(st.sampled_from([1, 2, 16])),
    )
    return work._replace(cache=cache)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(work=snapshot_workloads())
def test_rows_find_the_state_of_their_own_tokens(work: Workload) -> None:
    check_against_solo(work)
