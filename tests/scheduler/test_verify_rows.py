"""Which rows get drafts, how far they may reach, and what their tokens do when they come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.api import FinishReason
from jaxserve.config import Buckets, CacheConfig, ConfigError, SchedulerConfig
from jaxserve.plan import Row, Sampled, StepPlan, Verify
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Proposal, Proposer, Verification
from tests.scheduler.by_hand import PLAIN, STOP, commit, planned, request
from tests.scheduler.fake_runner import FakeGuide
from tests.scheduler.loop import Optimist

DRAFTS = (5, 6, 7)
BUCKETS = ((1, 8), (4, 4))


def for_each(propose: Callable[[Sequence], Proposal | None]) -> Proposer:
    """A proposer that looks at one sequence after the other."""

    def proposer(sequences: list[Sequence]) -> dict[int, Proposal]:
        found = {seq.id: propose(seq) for seq in sequences}
        return {key: proposal for key, proposal in found.items() if proposal is not None}

    return proposer


def always(seq: Sequence) -> Proposal:
    """Three drafts for whoever decodes."""
    return Proposal(4, DRAFTS)


def scheduler(
    propose: Callable[[Sequence], Proposal | None] = always, *, pages: int = 64, **limits: Any
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=6, max_model_len=64, max_num_batched_tokens=16, prefix_caching=False
    )
    return Scheduler(
        replace(config, **limits),
        CacheConfig(num_pages=pages + 1, page_size=2),
        verification=Verification(proposer=for_each(propose), buckets=BUCKETS),
        lengths=Optimist(),
        clock=lambda: 1.0,
    )


def decoding(sched: Scheduler, *names: str, prompt: int = 3, max_tokens: int = 40) -> None:
    """Requests whose prompts one step has computed: the host knows their first token."""
    for name in names:
        sched.add(request(name, prompt, max_tokens=max_tokens))
    plan = planned(sched)
    assert len(plan.rows) == len(names)
    commit(sched, plan)


def commit_verified(sched: Scheduler, plan: StepPlan, *tokens: list[int]) -> list[int | None]:
    """Commit what each row yielded; returns the tokens of the events."""
    results = [
        Sampled(first, further=tuple(Sampled(token) for token in rest)) for first, *rest in tokens
    ]
    events = sched.commit(plan, results)
    sched.check()
    return [event.token for event in events]


def asked(row: Row) -> Verify:
    assert row.verify is not None
    return row.verify


def test_a_row_has_its_drafts_and_pages_for_all_of_them() -> None:
    sched = scheduler()
    decoding(sched, "a")
    plan = planned(sched)
    (row,) = plan.rows
    assert plan.verify and plan.kind == "verify" and not plan.decode_only
    assert row.start == 3 and row.num_tokens == plan.num_tokens == 4
    assert asked(row) == Verify(4, 7, DRAFTS)
    assert [entry.position for entry in plan.pages] == [2, 3], "positions 4 to 6"


def test_the_next_row_reaches_as_far_as_the_one_in_flight_may_take_it() -> None:
    sched = scheduler()
    decoding(sched, "a")
    first, second = planned(sched), planned(sched)
    assert second.rows[0].start == 4
    assert asked(second.rows[0]) == Verify(4, 11, DRAFTS, follows=True)
    assert commit_verified(sched, first, [PLAIN] * 4) == [PLAIN] * 4
    third = planned(sched)
    assert third.rows[0].start == 8, "four tokens came, and one more is in flight"
    commit_verified(sched, second, [PLAIN])
    commit_verified(sched, third, [PLAIN, PLAIN])
    fourth = planned(sched)
    assert (fourth.rows[0].start, asked(fourth.rows[0]).follows) == (10, False)


def test_drafts_are_as_many_as_a_bucket_a_step_and_the_window_hold() -> None:
    sched = scheduler(lambda seq: Proposal(8, tuple(range(99))))
    decoding(sched, "a")
    (alone,) = planned(sched).rows
    assert alone.num_tokens == 8 and len(asked(alone).drafts or ()) == 14
    sched = scheduler(lambda seq: Proposal(8, DRAFTS), max_num_batched_tokens=7)
    decoding(sched, "a", "b", "c", prompt=2)
    assert [row.num_tokens for row in planned(sched).rows] == [4, 2, 1]


def test_more_rows_than_any_bucket_holds_are_decode_rows() -> None:
    sched = scheduler()
    decoding(sched, *"abcde")
    plan = planned(sched)
    assert len(plan.rows) == 5 and plan.decode_only


def test_rows_in_flight_are_gone_on_with_before_a_step_with_chunks() -> None:
    """They would get no token in it, as nobody knows yet where they begin."""
    sched = scheduler()
    decoding(sched, "a", "b")
    ahead = planned(sched)
    sched.add(request("c", 9))
    settling = planned(sched)
    assert settling.verify and not settling.admissions
    assert [asked(row) for row in settling.rows] == [Verify(1, 8, (), follows=True)] * 2
    commit_verified(sched, ahead, [PLAIN, 5], [PLAIN])
    mixed = planned(sched)
    assert [(row.seq_id, row.start) for row in mixed.rows] == [(0, 6), (1, 5), (2, 0)]
    assert not mixed.verify
    commit_verified(sched, settling, [PLAIN], [PLAIN])
    commit(sched, mixed)
    assert planned(sched).verify


def test_rows_without_a_guess_decode_beside_the_others() -> None:
    sched = scheduler(lambda seq: always(seq) if seq.request_id == "a" else None)
    decoding(sched, "a", "b")
    first = planned(sched)
    assert [row.verify is None for row in first.rows] == [False, True]
    second = planned(sched)
    assert [row.verify is None for row in second.rows] == [False, True]
    assert [row.start for row in second.rows] == [4, 4]


def guided_beside(sched: Scheduler, name: str, *others: str) -> int:
    """A request with a grammar and some without, all with their first token. Returns its token."""
    guided = request(name, max_tokens=40)
    sched.add(replace(guided, params=replace(guided.params, guide=FakeGuide(0))))
    for other in others:
        sched.add(request(other, max_tokens=40))
    plan = planned(sched)
    (mask,) = plan.rows[0].mask or b""
    token = mask.bit_length() - 1
    commit(sched, plan, token, *[PLAIN for _ in others])
    return token


def allowed_after(*tokens: int) -> int:
    state = FakeGuide(0).start()
    state.advance(*tokens)
    return state.mask[0].bit_length() - 1


def likely(*drafts: int) -> Proposal:
    return Proposal(4, drafts, (0.9,) * len(drafts))


def test_structured_output_takes_drafts_with_a_mask_for_each_position() -> None:
    """Those that its grammar allows; what comes back is reported at once."""
    chosen: list[int] = []
    sched = scheduler(lambda seq: likely(*chosen) if seq.guide else always(seq))
    chosen += [first := FakeGuide(0).start().mask[0].bit_length() - 1]
    chosen[:] = [allowed_after(first), allowed_after(first, allowed_after(first)), 9]
    token = guided_beside(sched, "a", "b")
    assert token == first
    plan = planned(sched)
    guided, other = map(asked, plan.rows)
    assert guided.drafts == tuple(chosen[:2]) and len(guided.masks) == guided.positions == 3
    state = FakeGuide(0).start()
    for mask, token in zip(guided.masks, chosen, strict=True):
        state.advance(first)
        first = token
        assert mask == state.mask
    assert other.drafts == DRAFTS and not other.masks
    assert [row.seq_id for row in planned(sched).rows] == [1], "it waits for its masks"


def test_structured_output_without_drafts_decodes_beside_rows_that_have_some() -> None:
    sched = scheduler(lambda seq: None if seq.guide else always(seq))
    guided_beside(sched, "a", "b")
    plan = planned(sched)
    assert [row.verify is None for row in plan.rows] == [True, False]
    assert plan.rows[0].mask is not None and asked(plan.rows[1]).drafts == DRAFTS


def test_no_masks_are_asked_for_while_too_much_runs_for_drafts() -> None:
    """Then structured output costs its grammar's process what it costs without speculation."""
    guessed: list[str] = []

    def propose(seq: Sequence) -> Proposal | None:
        guessed.append(seq.request_id)
        return None

    for others, expected in ((["b", "c", "d"], {"a"}), (["b", "c", "d", "e"], set[str]())):
        guessed.clear()
        sched = scheduler(propose)
        guided_beside(sched, "a", *others)
        assert set(guessed) == expected


def test_no_row_reaches_the_limit() -> None:
    """The last token is never computed, so a row may end with the one before it."""
    sched = scheduler()
    decoding(sched, "a", max_tokens=5)  # 8 tokens in all, of which 4 are there
    plan = planned(sched)
    assert asked(plan.rows[0]) == Verify(4, 7, DRAFTS)
    assert sched.plan() is None, "the row in flight may be the last"
    assert commit_verified(sched, plan, [PLAIN, PLAIN]) == [PLAIN, PLAIN]
    plan = planned(sched)
    assert (plan.rows[0].start, asked(plan.rows[0]).positions) == (5, 2)
    assert commit_verified(sched, plan, [PLAIN, PLAIN]) == [PLAIN, PLAIN]
    assert not sched.has_work


def test_drafts_take_no_page_that_another_sequence_may_need() -> None:
    sched = scheduler(pages=7)  # of which each of two needs three for its next position
    decoding(sched, "a", "b", prompt=4, max_tokens=20)
    plan = planned(sched)
    assert sched.pages.num_free == 1
    assert [asked(row) for row in plan.rows] == [Verify(2, 6, DRAFTS)] * 2
    assert sched.plan() is None, "nobody knows whether there is room for another token"


def test_chunk_scratch_bounds_what_the_rows_see() -> None:
    sched = scheduler(max_chunk_context=64)
    decoding(sched, "a", "b", prompt=8, max_tokens=50)
    assert planned(sched).verify
    sched = scheduler(max_chunk_context=64, max_num_batched_tokens=64)
    decoding(sched, "a", "b", prompt=30, max_tokens=30)
    assert planned(sched).decode_only, "twice 34 positions are 68"


@pytest.mark.parametrize("row", [0, 1])
def test_tokens_behind_a_stop_vanish(row: int) -> None:
    """Those of the row with the stop token, and the whole row that was ahead."""
    sched = scheduler()
    decoding(sched, "a")
    plans = [planned(sched), planned(sched)]
    yields = [[PLAIN, PLAIN], [PLAIN, PLAIN]]
    yields[row] = [PLAIN, STOP, PLAIN]
    tokens = [commit_verified(sched, *each) for each in zip(plans, yields, strict=True)]
    assert tokens == [[PLAIN, STOP], []] if row == 0 else [[PLAIN, PLAIN], [PLAIN, STOP]]
    assert not sched.has_work and sched.pages.num_free == 64


def test_a_row_without_numbers_ends_after_what_came_before() -> None:
    sched = scheduler()
    decoding(sched, "a")
    events = sched.commit(planned(sched), [Sampled(PLAIN, further=(Sampled(None),))])
    sched.check()
    assert [event.token for event in events] == [PLAIN, None]
    assert events[-1].finish is FinishReason.ERROR and not sched.has_work


def test_a_preempted_sequence_gets_the_tokens_in_flight() -> None:
    sched = scheduler()
    decoding(sched, "a")
    plan = planned(sched)
    sched._preempt(sched._live[0])  # pyright: ignore[reportPrivateUsage]
    sched.check()
    assert sched.plan() is None, "it is not admitted while anything is in flight"
    assert commit_verified(sched, plan, [PLAIN] * 3) == [PLAIN] * 3
    again = planned(sched)
    assert (again.rows[0].start, again.rows[0].num_tokens) == (0, 7)


def test_times_of_verify_steps_are_not_learned_as_those_of_others() -> None:
    sched = scheduler()
    decoding(sched, "a")
    assert sched.learn(planned(sched), 1.0) is None


@pytest.mark.parametrize("verify", [((1, 3),), ((0, 2),), ((2, 2), (2, 2))])
def test_buckets_that_cannot_be(verify: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="verify buckets"):
        Buckets(decode=(1,), prefill=(8,), verify=verify)
