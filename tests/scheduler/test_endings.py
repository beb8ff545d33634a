"""When a sequence ends, by its own doing or its client's."""

from __future__ import annotations

from jaxserve.api import (
    FinishReason,
    Request,
    SamplingParams,
    Start,
    TokenEvent,
    TokenLogprobs,
)
from jaxserve.plan import Sampled
from tests.scheduler.by_hand import (
    PLAIN,
    STOP,
    assert_empty,
    commit,
    planned,
    preempted_in_flight,
    request,
    scheduler,
    shape,
)


def test_a_stop_token_ends_the_sequence_and_is_reported() -> None:
    sched = scheduler()
    sched.add(request("a"))
    (event,) = commit(sched, planned(sched), STOP)
    assert event == TokenEvent("a", STOP, FinishReason.STOP)
    assert_empty(sched)


def test_a_prompt_that_fills_the_cache_still_has_its_one_token() -> None:
    sched = scheduler(pages=4)
    sched.add(request("a", 8))
    (event,) = commit(sched, planned(sched), PLAIN)
    assert event.finish is FinishReason.LENGTH
    assert_empty(sched, pages=4)


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
