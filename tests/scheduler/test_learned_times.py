"""The table that the scheduler goes by becomes that of the steps that run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.plan import Row, StepPlan, Verify
from jaxserve.scheduler.budget import Decodes, Prompt, TokenBudget
from jaxserve.scheduler.learned_times import LearnedTimes, StepClock
from jaxserve.step_times import StepTimes, VerifyTime

MS = 1e-3
TRUE = StepTimes(
    decode={1: 2.4 * MS, 32: 2.8 * MS, 128: 4 * MS},
    mixed={256: 5.6 * MS, 512: 7.9 * MS, 1024: 13.8 * MS, 2048: 25.4 * MS},
    decode_context=32e-9,
    mixed_context=35e-9,
)


def step(rows: int, chunk: int = 0, context: int = 1000) -> StepPlan:
    decodes = [Row(slot, slot, context, (), True) for slot in range(rows)]
    chunks = [Row(rows, rows, 0, (1,) * chunk, True)] if chunk else []
    return StepPlan(rows=(*decodes, *chunks))


def mixed(times: LearnedTimes, size: int) -> float:
    return times.of_mixed(size, 30, 30_000)


@pytest.mark.parametrize(
    "wrong", [(1, 1, 1, 1), (0.8, 0.8, 0.8, 0.8), (1.3, 0.84, 1, 0.9), (0.8, 1.3, 1.1, 0.75)]
)
def test_whatever_a_table_has_the_steps_that_run_are_known_within_2_percent(
    wrong: tuple[float, ...],
) -> None:
    """Measured with noise of 5 %, and a stall now and then."""
    table = {size: TRUE.mixed[size] * share for size, share in zip(TRUE.mixed, wrong, strict=True)}
    times = LearnedTimes(replace(TRUE, mixed=table))
    for turn in range(150):
        for size in TRUE.mixed:
            plan = step(30, size - 30)
            stalled = 10 if turn % 50 == 7 else 1
            times.learn(plan, TRUE.of(plan) * (0.95, 1.0, 1.05)[turn % 3] * stalled)
    for size in TRUE.mixed:
        assert mixed(times, size) == pytest.approx(TRUE.of_mixed(size, 30, 30_000), rel=0.02)


def test_each_bucket_has_a_correction_of_its_own() -> None:
    times = LearnedTimes(TRUE)
    for _ in range(200):
        plan = step(30, 512 - 30)
        times.learn(plan, TRUE.of(plan) + 0.6 * MS)
    off = [mixed(times, size) - TRUE.of_mixed(size, 30, 30_000) for size in TRUE.mixed]
    assert off == pytest.approx([0, 0.6 * MS, 0, 0], abs=0.05 * MS)
    assert times.of_decode(30, 0) == TRUE.of_decode(30, 0)


def test_verify_buckets_are_corrected_one_by_one() -> None:
    shapes = {(1, 8): VerifyTime(3 * MS, 1e-7), (4, 4): VerifyTime(4 * MS, 2e-7)}
    table = replace(TRUE, verify=shapes)
    times = LearnedTimes(table)
    rows = tuple(Row(n, n, 100, (), True, verify=Verify(3, 103, (1, 2))) for n in range(3))
    plan = StepPlan(rows=rows, verify=True)
    for _ in range(200):
        correction = times.learn(plan, table.of(plan) + 0.5 * MS)
    assert correction == ("verify", "4x4", pytest.approx(0.5 * MS, rel=0.1))
    assert times.of_verify(3, 3, 300) == pytest.approx(4.5 * MS + 300 * 2e-7, rel=0.02)
    assert times.of_verify(1, 8, 0) == 3 * MS
    assert times.of_verify(2, 8, 0) is None, "no bucket holds it"


def test_a_first_step_that_stalls_does_not_make_its_bucket_dear() -> None:
    times = LearnedTimes(TRUE)
    times.learn(step(30, 512 - 30), 5.0)
    assert mixed(times, 512) == pytest.approx(TRUE.of_mixed(512, 30, 30_000), rel=0.03)


def test_one_stalled_step_changes_little() -> None:
    times = LearnedTimes(TRUE)
    plan = step(30, 512 - 30)
    for _ in range(100):
        times.learn(plan, TRUE.of(plan))
    times.learn(plan, 5.0)
    assert mixed(times, 512) == pytest.approx(TRUE.of_mixed(512, 30, 30_000), rel=0.005)


def test_a_correction_is_bounded() -> None:
    times = LearnedTimes(TRUE)
    plan = step(30)
    for _ in range(1000):
        times.learn(plan, 1.0)
    assert times.learn(plan, 1.0) == ("decode", "32", pytest.approx(1.4 * MS))
    for _ in range(1000):
        times.learn(plan, 0.0)
    assert times.of_decode(30, 0) == pytest.approx(0.2 * 2.8 * MS)


def test_a_table_from_a_busy_gpu_is_corrected() -> None:
    """Four servers that started together measured 2.3 to 3 times the times of an idle GPU."""
    slow = {size: 3 * seconds for size, seconds in TRUE.mixed.items()}
    times = LearnedTimes(replace(TRUE, mixed=slow))
    for _ in range(400):
        plan = step(30, 512 - 30)
        times.learn(plan, TRUE.of(plan))
    assert mixed(times, 512) == pytest.approx(TRUE.of_mixed(512, 30, 30_000), rel=0.02)
    assert times.prefill_rate == pytest.approx(2048 / TRUE.mixed[2048], rel=0.02)


def test_a_bucket_that_a_busy_gpu_made_too_long_is_chosen_once_others_are_known() -> None:
    """27B's times, twice too long at the start: 512 tokens seemed to take longer than any token
    may, so nothing but 128 was ever chosen."""
    true = StepTimes(
        decode={1: 4.3 * MS, 32: 10 * MS},
        mixed={64: 13.6 * MS, 128: 16.5 * MS, 256: 24.2 * MS, 512: 36.3 * MS, 1024: 69.3 * MS},
        decode_context=0.0,
        mixed_context=0.0,
    )
    slow = {size: 2.1 * seconds for size, seconds in true.mixed.items()}
    times = LearnedTimes(replace(true, mixed=slow))
    budget = TokenBudget(times, max_tokens=1024, max_itl=50 * MS)
    chunks = []
    for _ in range(600):
        chunk = budget.chunk_tokens(Decodes(30, 30_000), [Prompt(0, 1000)] * 8)
        chunks.append(chunk)
        plan = step(30, chunk)
        times.learn(plan, true.of(plan))
    assert max(chunks[:32]) <= 128
    assert 512 - 30 in chunks[-64:] and max(chunks) <= 512
    assert mixed(times, 512) == pytest.approx(true.of_mixed(512, 30, 30_000), rel=0.05)


def test_a_bucket_without_steps_keeps_the_tables_time_beside_slightly_wrong_ones() -> None:
    times = LearnedTimes(TRUE)
    for _ in range(200):
        plan = step(30, 512 - 30)
        times.learn(plan, 0.85 * TRUE.of(plan))
    assert mixed(times, 1024) == TRUE.of_mixed(1024, 30, 30_000)


def test_prompts_that_are_read_alone_neither_teach_nor_learn() -> None:
    times = LearnedTimes(TRUE)
    assert times.learn(step(0, 512), 1.0) is None
    times.learn(step(30, 512 - 30), 12 * MS)
    assert times.of_mixed(512) == TRUE.of_mixed(512)
    assert mixed(times, 512) > TRUE.of_mixed(512, 30, 30_000)


def test_a_step_took_from_the_end_of_the_one_before_it() -> None:
    clock = StepClock()
    assert clock.took(10.004, seen=True) is None, "nobody saw it begin"
    assert clock.took(10.012, seen=True) == pytest.approx(8 * MS)


def test_a_step_whose_end_nobody_saw_does_not_count_nor_does_the_next_one() -> None:
    clock = StepClock()
    clock.took(10.004, seen=True)
    assert clock.took(10.020, seen=False) is None, "it had ended before"
    assert clock.took(10.029, seen=True) is None, "it may have been launched late"
    assert clock.took(10.037, seen=True) == pytest.approx(8 * MS)
    clock.rest()
    assert clock.took(20.004, seen=True) is None
