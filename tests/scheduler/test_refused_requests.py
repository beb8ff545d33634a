"""What is refused, and with which words, by example."""

from __future__ import annotations

import pytest

from jaxserve.api import (
    Overloaded,
    Rejected,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.admission import ExpectedOutput
from tests.scheduler.by_hand import (
    planned,
    request,
    scheduler,
)
from tests.scheduler.loop import Optimist


def test_a_prompt_that_leaves_no_room_in_the_context_is_rejected_with_the_numbers() -> None:
    sched = scheduler(model_len=8)
    with pytest.raises(Rejected, match=r"8 tokens.*context of 8 tokens") as caught:
        sched.add(request("a", 8))
    assert caught.value.code == "context_length_exceeded"
    sched.add(request("b", 7))


def test_a_prompt_larger_than_the_cache_is_rejected_with_the_numbers() -> None:
    sched = scheduler(pages=4)
    with pytest.raises(Rejected, match=r"9 tokens.*needs 5 pages of 2 tokens.*has 4"):
        sched.add(request("a", 9))
    sched.add(request("b", 8))


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


def test_a_request_that_fails_half_way_leaves_nothing_behind() -> None:
    class Faulty(Optimist):
        broken = False

        def of_new(self, max_tokens: int) -> ExpectedOutput:
            if self.broken:
                raise ZeroDivisionError
            return super().of_new(max_tokens)

    config = SchedulerConfig(
        max_num_seqs=1, max_model_len=64, max_num_batched_tokens=16, policy="slo"
    )
    lengths = Faulty()
    sched = Scheduler(config, CacheConfig(num_pages=65), lengths=lengths, clock=lambda: 1.0)
    sched.add(request("a"))
    lengths.broken = True
    with pytest.raises(ZeroDivisionError):
        sched.add(request("b"))
    lengths.broken = False
    sched.check()
    assert sched.num_waiting == 1
    sched.add(request("b"))
    planned(sched)
    sched.abort("a")
    assert [row.seq_id for row in planned(sched).rows] == [1]
