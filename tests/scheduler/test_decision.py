"""Drafts are verified where that is faster, and nowhere else, on a device with an H200's times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.decision import Decision
from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Proposal, Verification
from jaxserve.startup.buckets import GPU_VERIFY
from jaxserve.step_times import StepTimes, VerifyTime
from lab.simulation.simulate_speculation import (
    acceptance,
    fresh,
    looking_up,
    main,
    misleading,
    texts,
)
from lab.simulation.text_device import Text, goodput, serve

MS = 1e-3
TIMES = StepTimes.load(Path(__file__).parents[2] / "lab/measurements/step_times_verify_h200.json")
"""Those of Qwen3-4B on an H200, as measured when a server started."""
CLIENTS = (1, 2, 8, 16, 32, 64, 256)
TEXTS, SPREAD = texts(), texts(0.5)


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        pytest.param(*(name, clients), marks=pytest.mark.slow)
        if (clients == 256 and name != "misleading") or clients == 2
        else (name, clients)
        for name in TEXTS
        for clients in CLIENTS
    ],
)
def test_it_is_never_slower_than_plain_decoding(name: str, clients: int) -> None:
    steps = {16: 1500, 32: 1500}.get(clients, 600)
    plain = serve(TEXTS[name], TIMES, None, clients=clients, steps=steps)
    drafted = serve(TEXTS[name], TIMES, looking_up(), clients=clients, steps=steps)
    assert drafted.rate >= 0.99 * plain.rate, (drafted, plain)


@pytest.mark.parametrize(("clients", "least"), [(1, 3.0), (8, 1.8), (32, 1.1)])
def test_text_that_repeats_is_faster(clients: int, least: float) -> None:
    plain = serve(TEXTS["edits"], TIMES, None, clients=clients, steps=1000)
    drafted = serve(TEXTS["edits"], TIMES, looking_up(), clients=clients, steps=1000)
    assert drafted.rate > least * plain.rate, (drafted, plain)


def test_times_that_the_start_measured_wrongly_are_corrected() -> None:
    """Verify steps take longer than the table says: few are tried before it is known."""
    slow = replace(
        TIMES,
        verify={s: VerifyTime(1.45 * t.seconds, t.per_context) for s, t in TIMES.verify.items()},
    )
    plain = serve(misleading, TIMES, None, clients=8, steps=3000)
    drafted = serve(misleading, TIMES, looking_up(), clients=8, steps=3000, true=slow)
    assert drafted.verify_steps < 300
    assert drafted.rate >= 0.99 * plain.rate


def rows_asked(
    text: Callable[[Random], Text], clients: int, times: StepTimes = TIMES
) -> tuple[list[int], int]:
    """Of how many rows drafts were looked up each time, and the verify steps."""
    lookup, asked = Lookup(drafts=7), list[int]()

    def propose(sequences: list[Sequence]) -> Mapping[int, Proposal]:
        asked.append(len(sequences))
        return lookup(sequences)

    verification = Verification(proposer=propose, buckets=GPU_VERIFY)
    return asked, serve(text, times, verification, clients=clients, steps=400).verify_steps


@pytest.mark.parametrize("clients", [32, 64, 128])
def test_of_many_rows_few_are_read_where_those_have_far_too_few_drafts(clients: int) -> None:
    """Looking up costs the host microseconds a row: with nothing to find not even tokens of the
    other rows are read."""
    asked, verify_steps = rows_asked(fresh, clients)
    assert 0 < sum(asked) < 400 and max(asked) <= 10 and not verify_steps


def test_of_many_rows_all_are_read_where_a_few_have_enough_drafts() -> None:
    asked, verify_steps = rows_asked(TEXTS["edits"], 32)
    assert sum(asked) > 1000 and max(asked) > 20 and verify_steps > 20


def test_nothing_is_read_where_no_number_of_drafts_would_pay() -> None:
    """Twice the time for at most twice the tokens, and no bucket for so many rows."""
    time = VerifyTime(2.1 * TIMES.decode[64], 2.1 * TIMES.decode_context)
    slow = replace(TIMES, verify={(64, 2): time})
    assert rows_asked(TEXTS["edits"], 40, slow) == ([], 0)
    assert rows_asked(TEXTS["edits"], 256) == ([], 0)


def at_overload(name: str, verification: Verification | None, *, slots: int) -> float:
    """Half as many requests again as can be served: some always wait for a slot."""
    return goodput(
        TEXTS[name],
        TIMES,
        verification,
        slots=slots,
        requests_per_s={8: 30.0, 64: 60.0}[slots],
        seconds=4.0,
        ttft=3.0,
        tpot=0.03,
    )[0]


def test_goodput_at_overload_is_that_of_plain_decoding_or_more() -> None:
    plain, drafted = (at_overload("fresh", each, slots=64) for each in (None, looking_up()))
    assert drafted >= 0.99 * plain > 0
    plain, drafted = (at_overload("edits", each, slots=8) for each in (None, looking_up()))
    assert drafted > 1.5 * plain > 0, "who waits for a slot gets it sooner"


def decision() -> Decision:
    return Decision(LearnedTimes(TIMES), {positions for _, positions in GPU_VERIFY})


def test_as_many_positions_as_pay_are_computed() -> None:
    sure, unsure = [0.98**n for n in range(1, 8)], [0.5**n for n in range(1, 8)]
    assert decision().choose(1, 500, [sure], unsettled=0) == 8
    assert decision().choose(32, 500, [sure] * 32, unsettled=0) == 4
    assert decision().choose(64, 500, [sure] * 64, unsettled=0) == 2
    assert decision().choose(64, 500, [unsure] * 64, unsettled=0) == 0, "half of them is too few"
    assert decision().choose(256, 500, [sure] * 256, unsettled=0) == 0, "no bucket holds them"
    assert decision().choose(64, 500, [unsure] * 3, unsettled=0) == 0, "61 rows would wait"
    assert decision().choose(1, 500, [], unsettled=0) == 0


def test_no_step_is_longer_for_drafts_than_a_client_may_wait_for_a_token() -> None:
    """Three times as long as decode rows, for eight times the tokens: if the limit allows it."""
    slow = replace(TIMES, verify={s: VerifyTime(8.4 * MS, 0.0) for s in TIMES.verify})
    sure = [0.98**n for n in range(1, 8)]

    def chosen(max_itl: float) -> int:
        decision = Decision(LearnedTimes(slow), {8}, max_itl=max_itl)
        return decision.choose(8, 0, [sure] * 8, unsettled=0)

    assert [chosen(limit * MS) for limit in (50.0, 8.5, 8.3, 1.0)] == [8, 8, 0, 0]
    assert decision().choose(8, 0, [sure] * 8, unsettled=0) == 8, "hardly longer is no matter"


def test_rows_in_flight_are_gone_on_with_unless_few_would_wait() -> None:
    assert decision().choose(8, 500, [], unsettled=8) == 1
    assert decision().choose(64, 500, [], unsettled=1) == 0
    assert decision().settles(8, 500, 8) and not decision().settles(64, 500, 1)


def test_what_is_never_accepted_is_not_trusted_for_long() -> None:
    found, chosen = decision(), list[int]()
    for _ in range(40):
        chosen.append(found.choose(8, 500, [[0.9, 0.8, 0.7]] * 8, unsettled=0))
        found.observe(0)
    assert chosen[0] > 1 and chosen[-1] == 0 and found.trust < 0.3
    for _ in range(300):
        found.choose(8, 500, [], unsettled=0)
    assert found.choose(8, 500, [[0.9, 0.8, 0.7]] * 8, unsettled=0) > 1, "it is tried again"


def test_the_study_says_what_it_simulated(tmp_path: Path) -> None:
    out = tmp_path / "study.json"
    asked = "--texts edits,fresh --clients 2 --slots 2 --loads 1.5 --steps 60 --seconds 1 --seeds 2"
    main([*asked.split(), "--output", str(out)])
    result = json.loads(out.read_text())
    assert result["simulated"] and result["step_times"] == "step_times_verify_h200.json"
    loops = {each["text"]: each for each in result["closed_loops"]}
    assert loops["edits"]["low"] > 1.5 and loops["edits"]["verify_steps"] > 0
    assert loops["fresh"]["ratio"] == 1.0 and loops["fresh"]["verify_steps"] == 0
    assert [(each["text"], each["load"]) for each in result["overload"]] == [
        ("edits", 1.5),
        ("fresh", 1.5),
    ]
    gains = {(each["head"], each["text"]): each["ratio"] for each in result["heads"]}
    assert gains["dspark", "GSM8K"] > gains["dspark", "MT-Bench"] > 1.5
    assert sum(acceptance(3.64) ** place for place in range(8)) == pytest.approx(3.64)
    assert all(each["low"] <= each["ratio"] <= each["high"] for each in result["overload"])
    assert all(each["off_tok_per_s"] > 0 for each in result["overload"])


SLOWER = replace(
    TIMES,
    verify={s: VerifyTime(t.seconds + 0.7 * MS, t.per_context) for s, t in TIMES.verify.items()},
)
"""With a head that makes seven passes."""


def with_head(clients: int, accepted: float, steps: int) -> float:
    """Tokens per second of fresh text over those without the head."""
    head = HeadDrafts(drafts=7)
    drafting = Verification(proposer=head, buckets=GPU_VERIFY, observe=head.observe, room=7)
    plain, drafted = (
        serve(SPREAD["fresh"], times, arm, clients=clients, steps=steps, accepted=accepted)
        for times, arm in ((TIMES, None), (SLOWER, drafting))
    )
    return drafted.rate / plain.rate


@pytest.mark.parametrize(("clients", "least"), [(1, 2.8), (8, 1.8), (16, 1.4)])
def test_a_good_head_is_used_although_its_first_rows_have_no_drafts(
    clients: int, least: float
) -> None:
    assert with_head(clients, accepted=0.85, steps=400) > least


@pytest.mark.parametrize(("clients", "accepted", "steps"), [(1, 0.0, 6000), (8, 0.3, 1000)])
def test_that_a_head_is_mostly_wrong_is_learned_once(
    clients: int, accepted: float, steps: int
) -> None:
    assert with_head(clients, accepted, steps) > 0.98


def test_drafts_that_are_still_to_come_are_not_held_against_others() -> None:
    found, sure = decision(), [[0.9, 0.8, 0.7]] * 8
    for _ in range(10):
        assert found.choose(8, 500, [], unsettled=0, coming=sure) > 1
    assert found.trust == 1.0
