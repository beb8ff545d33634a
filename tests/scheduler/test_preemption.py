"""Who gives its pages back when they run out, by example."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.api import (
    FinishReason,
    TokenEvent,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from tests.scheduler.by_hand import (
    PLAIN,
    STOP,
    commit,
    planned,
    preempted_in_flight,
    request,
    scheduler,
    shape,
)
from tests.scheduler.loop import Loop


def test_the_last_to_arrive_is_preempted_and_keeps_the_token_in_flight() -> None:
    sched, in_flight = preempted_in_flight()
    events = commit(sched, in_flight, 5, 6)
    assert events == [TokenEvent("old", 5), TokenEvent("young", 6)]
    sched.abort("old")
    (row,) = planned(sched).rows
    assert (row.start, row.tokens) == (0, (1, 2, 3, PLAIN, PLAIN, PLAIN, 6)) and row.samples


def test_a_preempted_sequence_is_not_admitted_while_a_token_is_in_flight() -> None:
    sched, in_flight = preempted_in_flight()
    sched.abort("old")
    assert sched.plan() is None and sched.has_work
    commit(sched, in_flight)
    assert shape(planned(sched)) == [(1, 0, 7)]


def test_a_token_in_flight_may_end_a_preempted_sequence() -> None:
    sched, in_flight = preempted_in_flight()
    ended = commit(sched, in_flight, PLAIN, STOP)[1]
    assert (ended.finish, ended.preemptions) == (FinishReason.STOP, 1)
    assert sched.num_waiting == 0


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    sched, in_flight = preempted_in_flight()
    sched.add(request("later", 1))
    commit(sched, in_flight)
    sched.abort("old")
    assert shape(planned(sched)) == [(1, 0, 7), (2, 0, 1)]


def test_the_least_costly_is_preempted_and_not_the_last_to_arrive() -> None:
    sched = scheduler(pages=11)
    for name, length in (("old", 3), ("short", 1), ("long", 9)):
        sched.add(request(name, length, max_tokens=20))
    for _ in range(3):
        commit(sched, planned(sched))
    assert sched.num_preemptions == 0 and sched.num_running == 3
    while not sched.num_preemptions:
        commit(sched, planned(sched))
    assert [seq.request_id for seq in sched._waiting] == ["short"]  # pyright: ignore


def test_the_first_in_rank_is_not_preempted_even_if_it_costs_least() -> None:
    sched = scheduler(pages=8)
    sched.add(request("first", 1, max_tokens=20))
    sched.add(request("second", 9, max_tokens=20))
    while not sched.num_preemptions:
        commit(sched, planned(sched))
    assert [seq.request_id for seq in sched._waiting] == ["second"]  # pyright: ignore


def test_what_was_found_in_the_cache_costs_nothing_to_compute_again() -> None:
    """`hit` has more tokens than `cold`, which came after it, but computed fewer of them."""
    sched = scheduler(pages=15, prefix_caching=True)
    sched.add(request("first", 11, max_tokens=20))
    commit(sched, planned(sched))
    sched.add(request("hit", 11, max_tokens=20))
    sched.add(replace(request("cold", max_tokens=20), prompt=(7,) * 5))
    while not sched.num_preemptions:
        commit(sched, planned(sched))
    assert [seq.request_id for seq in sched._waiting] == ["hit"]  # pyright: ignore


def test_a_sequence_in_its_prefill_is_not_preempted() -> None:
    """It would have computed for nothing. Whoever needs a page goes without a row meanwhile."""
    sched = scheduler(seqs=2, tokens=2, pages=7)
    sched.add(request("decodes", max_tokens=20))
    for _ in range(2):
        commit(sched, planned(sched))
    sched.add(request("prefills", 7))
    plans = [planned(sched)]
    while not plans[-1].rows[-1].samples or plans[-1].rows[-1].seq_id != 1:
        commit(sched, plans[-1])
        plans.append(planned(sched))
    assert sched.num_preemptions == 0
    assert any(len(plan.rows) == 1 for plan in plans), "nobody ran short of pages"


def test_nobody_is_preempted_while_a_sequence_is_about_to_give_its_pages_back() -> None:
    sched = scheduler(pages=6)
    sched.add(request("old", max_tokens=20))
    sched.add(request("ends", max_tokens=4))
    plans = [planned(sched) for _ in range(4)]
    assert sched.pages.num_free == 0
    assert sched.plan() is None, "the first has to wait for a page"
    for plan in plans:
        commit(sched, plan)
    assert shape(planned(sched)) == [(0, 6, 1)]
    assert sched.num_preemptions == 0


def test_a_sequence_that_needs_a_page_and_is_the_last_to_arrive_yields_itself() -> None:
    sched = scheduler(pages=5)
    sched.add(request("old"))
    sched.add(request("young"))
    for _ in range(2):
        commit(sched, planned(sched))
    assert shape(planned(sched)) == [(0, 4, 1)]  # took the last page
    assert (sched.num_preemptions, sched.num_waiting) == (1, 1)


def test_in_a_pool_for_one_all_sequences_still_get_their_tokens() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_model_len=32, max_num_batched_tokens=5)
    loop = Loop(config, CacheConfig(num_pages=13, page_size=2))
    for name in "abcd":
        loop.add(request(name, 4, max_tokens=16))
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert all(len(loop.tokens(name)) == 16 for name in "abcd")
