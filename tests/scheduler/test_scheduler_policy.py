"""Who computes what, and when, by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.api import (
    FinishReason,
    Overloaded,
    Rejected,
    Request,
    SamplingParams,
    Start,
    TokenEvent,
    TokenLogprobs,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler, prefix
from tests.scheduler.loop import Loop, Optimist

PLAIN, STOP = 0, 9
"""Tokens that the scheduler is told were sampled: an ordinary one and a stop token."""


def scheduler(
    *,
    seqs: int = 4,
    tokens: int = 16,
    model_len: int = 64,
    pages: int = 64,
    page_size: int = 2,
    queued: int = 1024,
    prefix_caching: bool = False,
    chunk_context: int | None = None,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_model_len=model_len,
        max_num_batched_tokens=tokens,
        max_queued=queued,
        prefix_caching=prefix_caching,
        max_chunk_context=chunk_context,
    )
    cache = CacheConfig(num_pages=pages + 1, page_size=page_size)
    return Scheduler(config, cache, lengths=Optimist(), clock=lambda: 1.0)


def request(name: str, prompt: int = 3, *, max_tokens: int = 8, min_tokens: int = 0) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=frozenset({STOP})
    )
    return Request(id=name, prompt=tuple(range(1, prompt + 1)), params=params)


def planned(sched: Scheduler) -> StepPlan:
    plan = sched.plan()
    sched.check()
    assert plan is not None
    return plan


def commit(sched: Scheduler, plan: StepPlan, *tokens: int) -> list[TokenEvent]:
    """Commit a plan whose sampling rows yielded these tokens (all PLAIN if none is given)."""
    results = iter(tokens or [PLAIN] * len(plan.rows))
    sampled = [Sampled(next(results)) if row.samples else None for row in plan.rows]
    events = sched.commit(plan, sampled)
    sched.check()
    return [event._replace(start=None) for event in events]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of each row."""
    return [(row.seq_id, row.start, row.num_tokens) for row in plan.rows]


def assert_empty(sched: Scheduler, pages: int = 64) -> None:
    sched.check()
    assert not sched.has_work and sched.plan() is None
    assert (sched.num_running, sched.num_waiting, sched.pages.num_free) == (0, 0, pages)


# Order and limits of a step.


def test_sequences_are_admitted_in_order_of_arrival_as_slots_allow() -> None:
    sched = scheduler(seqs=2)
    for name in "abc":
        sched.add(request(name, max_tokens=1))
    first = planned(sched)
    assert shape(first) == [(0, 0, 3), (1, 0, 3)]
    assert (sched.num_running, sched.num_waiting) == (2, 1)
    commit(sched, first)
    assert shape(planned(sched)) == [(2, 0, 3)]


def test_a_short_request_does_not_overtake_a_long_one_that_lacks_pages() -> None:
    sched = scheduler(pages=10)
    sched.add(request("holds", 12))
    commit(sched, planned(sched))
    sched.add(request("long", 10))
    sched.add(request("short", 1))
    assert shape(planned(sched)) == [(0, 12, 1)]
    assert sched.num_waiting == 2


def test_decodes_come_first_and_prefill_chunks_take_the_rest_of_the_budget() -> None:
    sched = scheduler(tokens=4)
    sched.add(request("a"))
    commit(sched, planned(sched))
    sched.add(request("b", 7))
    sched.add(request("c", 2))
    second = planned(sched)
    assert shape(second) == [(0, 3, 1), (1, 0, 3)]
    assert [row.samples for row in second.rows] == [True, False]
    third = planned(sched)
    assert shape(third) == [(0, 4, 1), (1, 3, 3)]
    fourth = planned(sched)
    assert shape(fourth) == [(0, 5, 1), (1, 6, 1), (2, 0, 2)]
    assert [row.samples for row in fourth.rows] == [True, True, True]


def test_the_chunks_of_a_step_see_no_more_context_together_than_the_kv_format_expands() -> None:
    """10 tokens are 5 pages: a's whole prompt, or what c and d have done by then."""
    sched = scheduler(tokens=8, model_len=10, chunk_context=10)
    for name, prompt in (("a", 9), ("b", 9), ("c", 3), ("d", 4)):
        sched.add(request(name, prompt, max_tokens=1))
    assert shape(planned(sched)) == [(0, 0, 8)]
    assert shape(planned(sched)) == [(0, 8, 1)]  # b would see 5 pages more
    assert shape(planned(sched)) == [(1, 0, 8)]
    assert shape(planned(sched)) == [(1, 8, 1)]
    assert shape(planned(sched)) == [(2, 0, 3), (3, 0, 4)]


def test_chunks_carry_the_tokens_of_the_prompt_and_decodes_carry_none() -> None:
    sched = scheduler(seqs=1, tokens=2)
    sched.add(request("a"))
    chunks = [planned(sched).rows[0].tokens for _ in range(3)]
    assert chunks == [(1, 2), (3,), ()]


def test_a_plan_without_prefill_is_decode_only() -> None:
    sched = scheduler()
    sched.add(request("a"))
    first, second = planned(sched), planned(sched)
    assert not first.decode_only and second.decode_only


def test_an_admission_brings_its_parameters_and_a_page_table_entry_for_each_page() -> None:
    sched = scheduler()
    sched.add(request("a", 5))
    plan = planned(sched)
    (admission,) = plan.admissions
    assert admission.params == request("a", 5).params
    assert [(entry.slot, entry.position) for entry in plan.pages] == [
        (admission.slot, position) for position in range(3)
    ]
    assert all(entry.page > 0 for entry in plan.pages)
    assert planned(sched).pages == ()  # position 5 has room in the third page
    (entry,) = planned(sched).pages
    assert (entry.slot, entry.position) == (admission.slot, 3)


def test_admission_leaves_room_for_the_growth_of_those_who_run() -> None:
    sched = scheduler(pages=5)
    sched.add(request("a", 4))
    commit(sched, planned(sched))  # 2 pages, and a third with the next token
    sched.add(request("b", 4))
    assert shape(planned(sched)) == [(0, 4, 1)]  # 2 pages are free, but "a" may want one of them
    sched.abort("a")
    assert shape(planned(sched)) == [(1, 0, 4)]


def test_a_long_prefill_is_admitted_only_with_room_for_all_that_happens_meanwhile() -> None:
    sched = scheduler(pages=12, tokens=4)
    sched.add(request("a", 4, max_tokens=20))
    commit(sched, planned(sched))
    sched.add(request("b", 10))  # 3 tokens a step beside "a": "a" may take 1 + 3 // 2 pages
    for _ in range(20):
        plan = planned(sched)
        commit(sched, plan)
        if plan.rows[-1].seq_id == 1 and plan.rows[-1].samples:
            break
    assert sched.num_preemptions == 0


# Refusals.


def test_a_prompt_that_leaves_no_room_in_the_context_is_rejected_with_the_numbers() -> None:
    sched = scheduler(model_len=8)
    with pytest.raises(Rejected, match=r"8 tokens.*context of 8 tokens") as caught:
        sched.add(request("a", 8))
    assert caught.value.code == "context_length_exceeded"
    sched.add(request("b", 7))


def test_a_prompt_larger_than_the_cache_is_rejected_with_the_numbers() -> None:
    sched = scheduler(pages=4)
    with pytest.raises(Rejected, match=r"8 tokens.*needs 5 pages of 2 tokens.*has 4"):
        sched.add(request("a", 8))
    sched.add(request("b", 7))


def test_an_empty_prompt_is_rejected() -> None:
    with pytest.raises(Rejected, match="prompt is empty"):
        scheduler().add(request("a", 0))


def test_a_request_for_no_tokens_is_rejected() -> None:
    with pytest.raises(Rejected, match="at least 1, got 0"):
        scheduler().add(request("a", max_tokens=0))


def test_an_id_in_use_is_rejected_and_a_finished_one_may_come_again() -> None:
    sched = scheduler()
    sched.add(request("a"))
    with pytest.raises(Rejected, match="'a'"):
        sched.add(request("a"))
    sched.abort("a")
    sched.add(request("a"))


def test_a_full_queue_is_overloaded_and_takes_requests_again_when_it_moves() -> None:
    sched = scheduler(seqs=1, queued=2)
    sched.add(request("a"))
    planned(sched)
    sched.add(request("b"))
    sched.add(request("c"))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        sched.add(request("d"))
    sched.abort("b")
    sched.add(request("d"))


def test_a_burst_that_free_slots_can_take_is_not_overload() -> None:
    sched = scheduler(seqs=3, queued=1)
    for name in "abcd":
        sched.add(request(name))
    with pytest.raises(Overloaded):
        sched.add(request("e"))


# Endings.


def test_a_stop_token_ends_the_sequence_and_is_reported() -> None:
    sched = scheduler()
    sched.add(request("a"))
    (event,) = commit(sched, planned(sched), STOP)
    assert event == TokenEvent("a", STOP, FinishReason.STOP)
    assert_empty(sched)


def test_stop_tokens_before_min_tokens_do_not_end_the_sequence() -> None:
    sched = scheduler()
    sched.add(request("a", min_tokens=2))
    assert commit(sched, planned(sched), STOP)[0].finish is None
    assert commit(sched, planned(sched), STOP)[0].finish is FinishReason.STOP


def test_a_stop_token_at_max_tokens_counts_as_stop() -> None:
    sched = scheduler()
    sched.add(request("a", max_tokens=1))
    assert commit(sched, planned(sched), STOP)[0].finish is FinishReason.STOP


def test_max_tokens_ends_with_length_and_no_row_is_planned_beyond_it() -> None:
    sched = scheduler()
    sched.add(request("a", max_tokens=2))
    first, second = planned(sched), planned(sched)
    assert sched.plan() is None and sched.has_work
    assert commit(sched, first)[0].finish is None
    assert sched.plan() is None and sched.has_work
    assert commit(sched, second)[0].finish is FinishReason.LENGTH
    assert_empty(sched)


def test_max_tokens_is_clamped_by_the_context() -> None:
    sched = scheduler(model_len=8)
    sched.add(request("a", 6, max_tokens=1000))
    assert commit(sched, planned(sched))[0].finish is None
    assert commit(sched, planned(sched))[0].finish is FinishReason.LENGTH


def test_a_lone_sequence_that_fills_the_cache_ends_with_length() -> None:
    sched = scheduler(pages=3)
    sched.add(request("a", 4, max_tokens=1000))
    finishes = [commit(sched, planned(sched))[0].finish for _ in range(3)]
    assert finishes == [None, None, FinishReason.LENGTH]  # 6 positions, and a token beyond them
    assert sched.num_preemptions == 0
    assert_empty(sched, pages=3)


def test_a_request_gets_as_many_alternatives_as_it_asked_for() -> None:
    sched = scheduler()
    for name, wanted in (("none", None), ("zero", 0), ("one", 1)):
        params = SamplingParams(max_tokens=4, logprobs=wanted)
        sched.add(Request(id=name, prompt=(1, 2), params=params))
    plan = planned(sched)
    assert [row.logprobs for row in plan.rows] == [False, True, True]
    assert [row.logprobs for row in planned(sched).rows] == [False, True, True]
    reported = TokenLogprobs(-1.0, ((3, -0.5), (4, -1.5)))
    events = sched.commit(plan, [Sampled(0), Sampled(0, reported), Sampled(0, reported)])
    assert all(event.start == Start(0.0, 0.0, 1.0) for event in events)
    assert [event.logprobs for event in events] == [
        None,
        TokenLogprobs(-1.0, ()),
        TokenLogprobs(-1.0, ((3, -0.5),)),
    ]


def test_the_wasted_row_of_a_stopped_sequence_is_ignored_when_its_slot_has_a_new_owner() -> None:
    sched = scheduler(seqs=1)
    sched.add(request("old"))
    sched.add(request("new"))
    first, wasted = planned(sched), planned(sched)
    commit(sched, first, STOP)
    admitted = planned(sched)
    assert admitted.rows[0].slot == wasted.rows[0].slot
    assert commit(sched, wasted, STOP) == []
    assert commit(sched, admitted) == [TokenEvent("new", PLAIN)]


# Aborts.


def test_an_abort_while_waiting_leaves_the_queue_in_order() -> None:
    sched = scheduler(seqs=1)
    for name in "abc":
        sched.add(request(name))
    sched.abort("b")
    sched.check()
    assert sched.num_waiting == 2
    commit(sched, planned(sched), STOP)
    assert shape(planned(sched)) == [(2, 0, 3)]


def test_an_abort_in_the_middle_of_a_prefill_frees_everything_at_once() -> None:
    sched = scheduler(tokens=4)
    sched.add(request("a", 10))
    plan = planned(sched)
    sched.abort("a")
    assert_empty(sched)
    assert commit(sched, plan) == []


def test_an_abort_with_tokens_in_flight_frees_at_once_and_yields_no_more_events() -> None:
    sched = scheduler()
    sched.add(request("a"))
    first, second = planned(sched), planned(sched)
    commit(sched, first)
    third = planned(sched)
    sched.abort("a")
    assert_empty(sched)
    assert commit(sched, second) == commit(sched, third) == []


def test_an_abort_of_a_preempted_sequence_drops_the_token_in_flight() -> None:
    sched, preempting = preempted_in_flight()
    sched.abort("young")
    sched.check()
    assert [event.request_id for event in commit(sched, preempting)] == ["old"]
    assert sched.num_waiting == 0


def test_an_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    sched = scheduler()
    sched.add(request("a"))
    commit(sched, planned(sched), STOP)
    sched.abort("a")
    sched.abort("never heard of")
    assert_empty(sched)


# Preemption.


def preempted_in_flight(*, prefix_caching: bool = False) -> tuple[Scheduler, StepPlan]:
    """`old` took the last page from `young`, one token of which is in the returned plan."""
    sched = scheduler(pages=6, prefix_caching=prefix_caching)
    sched.add(replace(request("old"), cache_salt="of its own"))
    sched.add(request("young"))
    for _ in range(3):
        commit(sched, planned(sched))
    in_flight = planned(sched)
    assert shape(in_flight) == [(0, 5, 1), (1, 5, 1)] and sched.pages.num_free == 0
    squeezed = planned(sched)
    assert shape(squeezed) == [(0, 6, 1)]
    assert (sched.num_preemptions, sched.num_running, sched.num_waiting) == (1, 1, 1)
    return sched, in_flight


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
    assert commit(sched, in_flight, PLAIN, STOP)[1].finish is FinishReason.STOP
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


# Prefixes.


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


# Failures of the device.


def test_a_failed_step_ends_its_requests_and_the_others_go_on() -> None:
    sched = scheduler(seqs=1)
    sched.add(request("a"))
    sched.add(request("b"))
    plan = planned(sched)
    assert sched.fail([plan]) == [TokenEvent("a", None, FinishReason.ERROR)]
    assert shape(planned(sched)) == [(1, 0, 3)]


def test_after_a_failure_what_is_left_starts_from_its_first_token() -> None:
    sched = scheduler(seqs=2, tokens=4)
    sched.add(request("a", 12))
    sched.add(request("b", 12))
    for _ in range(3):
        commit(sched, planned(sched))
    both = planned(sched)
    assert shape(both) == [(0, 12, 1), (1, 0, 3)]
    commit(sched, both)
    assert sched.fail([]) == []
    assert sched.pages.num_free == 64 and sched.num_waiting == 2
    assert shape(planned(sched)) == [(0, 0, 4)]


def test_failing_everything_ends_what_runs_and_what_waits() -> None:
    sched = scheduler(seqs=1)
    sched.add(request("a"))
    sched.add(request("b"))
    plan = planned(sched)
    events = sched.fail()
    assert [(event.request_id, event.finish) for event in events] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]
    assert_empty(sched)
    assert commit(sched, plan) == []


def test_a_sequence_that_ended_before_the_failure_gets_no_error() -> None:
    sched = scheduler()
    sched.add(request("a"))
    first, second = planned(sched), planned(sched)
    commit(sched, first, STOP)
    assert sched.fail([second]) == []
