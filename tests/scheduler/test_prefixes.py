"""What is found in the prefix cache, by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.api import (
    Request,
    SamplingParams,
)
from jaxserve.scheduler import Scheduler, prefix
from tests.scheduler.by_hand import (
    PLAIN,
    assert_empty,
    commit,
    planned,
    preempted_in_flight,
    request,
    scheduler,
    shape,
)


def finish(sched: Scheduler, *tokens: int) -> None:
    """Run everything to its end, one step at a time."""
    while (plan := sched.plan()) is not None:
        commit(sched, plan, *tokens)


def cached_tokens(sched: Scheduler, name: str, prompt: int = 3, *, salt: str = "") -> int:
    """Of a request that runs alone to its end."""
    sched.add(replace(request(name, prompt, max_tokens=1), cache_salt=salt))
    (event,) = commit(sched, planned(sched))
    return event.cached_tokens


def test_a_prompt_that_was_computed_before_is_found_up_to_its_last_full_page() -> None:
    sched = scheduler(page_size=4, prefix_caching=True)
    assert cached_tokens(sched, "cold", 11) == 0
    assert cached_tokens(sched, "same", 11) == 8
    assert cached_tokens(sched, "shorter", 6) == 4
    assert cached_tokens(sched, "longer", 13) == 8
    assert cached_tokens(sched, "longer again", 13) == 12
    assert_empty(sched)


def test_a_hit_leaves_the_tokens_that_each_sequence_computes_itself() -> None:
    sched = scheduler(page_size=4, prefix_caching=True, own_tokens=4)
    assert cached_tokens(sched, "cold", 13) == 0
    sched.add(replace(request("hit", 13, max_tokens=1)))
    first = planned(sched)
    assert shape(first) == [(1, 0, 4)]
    rest = planned(sched)
    assert shape(rest) == [(1, 12, 1)]
    assert commit(sched, first, *[PLAIN] * 0) == []
    (event,) = commit(sched, rest)
    assert event.cached_tokens == 8
    assert_empty(sched)


def test_pages_that_a_sequence_would_compute_itself_are_no_hit() -> None:
    sched = scheduler(page_size=4, prefix_caching=True, own_tokens=4)
    assert cached_tokens(sched, "cold", 7) == 0
    sched.add(replace(request("same", 7, max_tokens=1)))
    plan = planned(sched)
    assert shape(plan) == [(1, 0, 7)]
    (event,) = commit(sched, plan)
    assert event.cached_tokens == 0


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    sched = scheduler(page_size=4, prefix_caching=True)
    cached_tokens(sched, "cold", 8)
    sched.add(request("hit", 8))
    assert shape(planned(sched)) == [(1, 4, 4)]


def test_the_first_event_tells_how_much_was_cached_and_no_later_one() -> None:
    sched = scheduler(prefix_caching=True)
    cached_tokens(sched, "cold", 5)
    sched.add(request("hit", 5))
    assert [commit(sched, planned(sched))[0].cached_tokens for _ in range(3)] == [4, 0, 0]


def test_answers_are_found_as_the_beginning_of_a_later_prompt() -> None:
    sched = scheduler(prefix_caching=True)
    sched.add(request("turn 1", 3, max_tokens=4))
    finish(sched, 4, 4, 4, 4)
    prompt = (1, 2, 3, 4, 4, 4, 4, 5)
    sched.add(Request(id="turn 2", prompt=prompt, params=SamplingParams(max_tokens=1)))
    assert shape(planned(sched)) == [(1, 6, 2)]  # the last token of an answer is never computed


def test_sequences_of_one_plan_share_their_prefix() -> None:
    sched = scheduler(prefix_caching=True)
    sched.add(request("a", 7))
    sched.add(request("b", 7))
    plan = planned(sched)
    assert shape(plan) == [(0, 0, 7), (1, 6, 1)]
    assert sched.pages.num_free == 64 - 4 - 1
    commit(sched, plan)
    finish(sched)
    assert_empty(sched)


def test_a_shared_prefix_outlives_the_sequence_that_computed_it() -> None:
    sched = scheduler(prefix_caching=True)
    sched.add(request("a", 7))
    commit(sched, planned(sched))
    sched.add(request("b", 7))
    commit(sched, planned(sched))
    sched.abort("a")
    sched.check()
    finish(sched)
    assert cached_tokens(sched, "c", 7) == 6


@pytest.mark.parametrize("salts", [("a", ""), ("a", "b"), ("", "a"), ("1:a", "a")])
def test_requests_of_different_salt_never_share(salts: tuple[str, str]) -> None:
    sched = scheduler(prefix_caching=True)
    cached_tokens(sched, "cold", 7, salt=salts[0])
    assert cached_tokens(sched, "other", 7, salt=salts[1]) == 0
    assert cached_tokens(sched, "same", 7, salt=salts[0]) == 6


def test_pages_of_another_model_have_other_hashes() -> None:
    parts = [("a", ""), ("b", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    pages = {prefix.page_hashes(prefix.root(*p), range(4), 2)[1] for p in parts}
    assert len(pages) == len(parts)


def test_a_model_publishes_its_pages_under_its_own_name() -> None:
    for identity, found in (("one", 3), ("another", 0)):
        sched = scheduler(prefix_caching=True, identity=identity)
        cached_tokens(sched, "cold", 7, salt="a")
        names = prefix.page_hashes(prefix.root("one", "a"), range(1, 8), 2)
        assert len(sched.pages.find(names)) == found


def test_a_page_is_found_only_behind_the_pages_it_was_computed_behind() -> None:
    root = prefix.root("model", "")
    first, second = (prefix.page_hashes(root, tokens, 2) for tokens in ((1, 2, 3, 4), (5, 6, 3, 4)))
    assert first[1] != second[1]
    assert prefix.page_hashes(first[0], (3, 4), 2) == first[1:]


def test_the_prefix_unused_for_longest_makes_room_first() -> None:
    sched = scheduler(pages=8, prefix_caching=True)
    for name, length in (("old", 5), ("new", 6)):
        sched.add(replace(request(name, max_tokens=1), prompt=(length,) * length))
        commit(sched, planned(sched))
    sched.add(replace(request("big", max_tokens=1), prompt=(9,) * 11))
    commit(sched, planned(sched))
    for name, length, cached in (("new", 6, 4), ("old", 5, 0)):
        sched.add(replace(request(name, max_tokens=1), prompt=(length,) * length))
        assert commit(sched, planned(sched))[0].cached_tokens == cached


def test_a_preempted_sequence_finds_what_it_computed() -> None:
    sched, in_flight = preempted_in_flight(prefix_caching=True)
    commit(sched, in_flight, 5, 6)
    sched.abort("old")
    (row,) = planned(sched).rows
    assert (row.start, row.tokens) == (4, (PLAIN, PLAIN, 6))  # its third page was not full


def test_without_prefix_caching_nothing_is_found() -> None:
    sched = scheduler()
    cached_tokens(sched, "cold", 7)
    assert cached_tokens(sched, "same", 7) == 0
    assert sched.pages.num_published == 0


def test_a_reset_forgets_prefixes_and_running_sequences_go_on() -> None:
    sched = scheduler(prefix_caching=True)
    sched.add(request("a", 7))
    commit(sched, planned(sched))
    sched.reset_prefix_cache()
    sched.add(request("b", 7))
    assert shape(planned(sched)) == [(0, 7, 1), (1, 0, 7)]


def test_after_a_failure_no_prefix_is_found() -> None:
    sched = scheduler(prefix_caching=True)
    cached_tokens(sched, "cold", 7)
    sched.fail([])
    assert cached_tokens(sched, "same", 7) == 0
