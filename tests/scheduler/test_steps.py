"""Who computes what in a step, by example."""

from __future__ import annotations

import pytest

from jaxserve.scheduler.budget import Decodes, Prompt, TokenBudget
from tests.scheduler.by_hand import (
    commit,
    planned,
    request,
    scheduler,
    shape,
)


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


def test_the_budget_is_told_what_runs_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Decodes, list[Prompt], int]] = []

    def chunk_tokens(_: TokenBudget, decodes: Decodes, pending: list[Prompt], queued: int) -> int:
        asked.append((decodes, pending, queued))
        return 2

    sched = scheduler(seqs=3, prefix_caching=True)
    sched.add(request("decodes", 5))
    commit(sched, planned(sched))
    sched.add(request("finds 4 of them", 9))
    sched.add(request("finds 4 of them too", 8))
    for number in range(5):
        sched.add(request(f"has no slot {number}", 5))
    monkeypatch.setattr(TokenBudget, "chunk_tokens", chunk_tokens)
    for _ in range(2):
        commit(sched, planned(sched))
    assert asked == [
        (Decodes(1, 5), [Prompt(4, 5), Prompt(4, 4)], 5),
        (Decodes(1, 6), [Prompt(6, 3, 2), Prompt(6, 2)], 5),
    ]


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
