"""What is left when the device has lost its state, or computed what is not a number."""

from __future__ import annotations

from jaxserve.api import (
    FinishReason,
    TokenEvent,
)
from jaxserve.plan import Sampled
from tests.scheduler.by_hand import (
    STOP,
    assert_empty,
    commit,
    planned,
    request,
    scheduler,
    shape,
)


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


def test_a_sequence_without_numbers_ends_and_leaves_no_prefix() -> None:
    sched = scheduler(seqs=2, tokens=32, prefix_caching=True)
    sched.add(request("a", 12))
    sched.add(request("b", 8))
    first, second = planned(sched), planned(sched)
    events = sched.commit(first, [Sampled(None), Sampled(5)])
    assert [(event.request_id, event.token, event.finish) for event in events] == [
        ("a", None, FinishReason.ERROR),
        ("b", 5, None),
    ]
    assert [event.request_id for event in commit(sched, second)] == ["b"]
    sched.add(request("c", 12))  # the prompt of a
    assert shape(planned(sched)) == [(1, 9, 1), (2, 0, 12)]
