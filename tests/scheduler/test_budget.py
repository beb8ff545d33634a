"""How large the next chunk is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.scheduler import budget as budgets
from jaxserve.scheduler.budget import Decodes, Prompt, TokenBudget
from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.step_times import StepTimes

MS = 1e-3
SIZES = (16, 64, 256, 1024, 2048)
TIMES = StepTimes(
    decode={1: 3.7 * MS, 64: 4.2 * MS, 256: 6 * MS},
    mixed={16: 4 * MS, 64: 4.5 * MS, 256: 6 * MS, 1024: 17 * MS, 2048: 34 * MS},
    mixed_row=0.05 * MS,
    chunk_pair=1e-9,
)
IDLE = Decodes(0, 0)


def budget(times: StepTimes | None = TIMES, *, max_itl: float = 50 * MS) -> TokenBudget:
    return TokenBudget(times and LearnedTimes(times), max_tokens=2048, max_itl=max_itl)


def test_without_measured_times_a_step_takes_all_it_can() -> None:
    assert budget(None).chunk_tokens(Decodes(5, 100), [Prompt(0, 4000)]) == 2043


def test_a_lone_prompt_fills_the_largest_bucket_it_can() -> None:
    assert budget().chunk_tokens(IDLE, [Prompt(0, 16_384)]) == 2048
    assert budget().chunk_tokens(IDLE, [Prompt(0, 1024)]) == 1024


def test_a_prompt_a_little_larger_than_a_bucket_takes_two_steps_and_not_a_padded_one() -> None:
    assert budget().chunk_tokens(IDLE, [Prompt(0, 1087)]) == 1024
    assert budget().chunk_tokens(Decodes(63, 0), [Prompt(0, 1024)]) == 1024 - 63


def test_a_prompt_much_larger_than_a_bucket_takes_one_step() -> None:
    assert budget().chunk_tokens(IDLE, [Prompt(0, 2000)]) == 2048
    assert budget().chunk_tokens(IDLE, [Prompt(0, 100)]) == 256


def test_several_prompts_count_together() -> None:
    prompts = [Prompt(0, 500), Prompt(64, 524)]
    assert budget().chunk_tokens(IDLE, prompts) == 1024


MANY = 100


def mean_chunk(
    streams: int,
    pending: list[Prompt],
    chooser: TokenBudget | None = None,
    *,
    queued: int = 0,
) -> float:
    """Of many steps, as long as the same waits."""
    chooser = chooser or budget(max_itl=1.0)
    decodes = Decodes(streams, 0)
    return mean(chooser.chunk_tokens(decodes, pending, queued) for _ in range(MANY))


def test_prompts_beside_streams_are_read_at_their_pace() -> None:
    for prompts in (2, 3, 7):
        pace = prompts * 7000 / budgets.PREFILL_HORIZON_STEPS
        assert mean_chunk(8, [Prompt(0, 7000)] * prompts) == pytest.approx(pace, rel=0.03)
        assert mean_chunk(8, [Prompt(0, 7000)], queued=prompts - 1) == pytest.approx(pace, 0.03)
    assert mean_chunk(8, [Prompt(0, 7000)] * 64) == 2048 - 8


def test_a_small_chunk_that_is_more_than_the_pace_is_left_out_of_one_step_in_seven() -> None:
    small = 256 - 8
    for tokens, share in ((7000, 7000 / budgets.PREFILL_HORIZON_STEPS / small), (5000, 0.85)):
        assert mean_chunk(8, [Prompt(0, tokens)]) == pytest.approx(share * small, rel=0.03)
        chooser = budget()
        chunks = [chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, tokens)]) for _ in range(MANY)]
        assert set(chunks) == {0, small}
        assert all(chunks[:6]), "what comes while nothing waits is read at once"
        assert all(any(pair) for pair in itertools.pairwise(chunks))


def test_who_comes_when_nothing_waits_is_read_at_once() -> None:
    chooser = budget()
    for _ in range(6):
        assert chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, 5000)])
    chooser.chunk_tokens(Decodes(8, 0), [])
    assert all(chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, 5000)]) for _ in range(6))


def test_few_tokens_are_read_in_small_chunks_without_a_break() -> None:
    """As few as half of the pace asks for."""
    chooser = budget()
    for tokens in (100, 1000, 3800):
        for _ in range(20):
            assert chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, tokens)]) >= min(tokens, 256 - 8)


def read_in_large_small_chunks() -> TokenBudget:
    """Beside many streams small chunks are large: the next one of them would be left out."""
    chooser = budget(max_itl=1.0)
    for _ in range(6):
        assert chooser.chunk_tokens(Decodes(247, 0), [Prompt(0, 40_000)]) == 2048 - 247
    return chooser


def test_few_tokens_are_read_without_a_break_whatever_was_read_before() -> None:
    chooser = read_in_large_small_chunks()
    for _ in range(20):
        assert chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, 2000)]) == 256 - 8


def test_a_larger_chunk_before_leaves_out_no_more_than_one() -> None:
    chooser = read_in_large_small_chunks()
    chunks = [chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, 5000)]) for _ in range(MANY)]
    assert set(chunks) == {0, 256 - 8}
    assert all(any(pair) for pair in itertools.pairwise(chunks))


situations = st.tuples(
    st.integers(1, 300),
    st.lists(
        st.builds(Prompt, st.integers(0, 30_000), st.integers(1, 9000), st.integers(0, 9000)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 20),
)


@given(
    steps=st.lists(situations, min_size=2, max_size=12),
    seconds=st.lists(st.integers(1, 60), min_size=len(SIZES), max_size=len(SIZES)).map(sorted),
)
def test_no_two_steps_in_a_row_leave_out_prompts_that_wait(
    steps: list[tuple[int, list[Prompt], int]], seconds: list[int]
) -> None:
    """However the decodes beside them, what waits, and with them the chunks change."""
    mixed = {size: s * MS for size, s in zip(SIZES, seconds, strict=True)}
    chooser = budget(StepTimes(decode={256: 0.5 * MS}, mixed=mixed, chunk_pair=1e-9))
    chunks = [chooser.chunk_tokens(Decodes(rows, 0), *rest) for rows, *rest in steps]
    assert all(any(pair) for pair in itertools.pairwise(chunks))


@given(steps=st.lists(situations, max_size=12), prompts=situations)
def test_without_decodes_a_step_is_never_empty(
    steps: list[tuple[int, list[Prompt], int]], prompts: tuple[int, list[Prompt], int]
) -> None:
    """All that decode may wait for their masks: nothing else would be in the plan."""
    chooser = budget()
    for rows, pending, queued in steps:
        chooser.chunk_tokens(Decodes(rows, 0), pending, queued)
    _, pending, queued = prompts
    for guided in (0, 3):
        assert chooser.chunk_tokens(Decodes(0, 0, guided), pending, queued) > 0


@given(
    streams=st.integers(1, 200),
    prompts=st.lists(st.integers(1, 2000), min_size=1, max_size=8),
    queued=st.integers(0, 100),
    wrong=st.floats(0.5, 2.0),
)
def test_what_waits_is_read_within_so_many_steps_whatever_the_times_are_worth(
    streams: int, prompts: list[int], queued: int, wrong: float
) -> None:
    """Or in the largest steps that there are."""
    mixed = {
        size: seconds * wrong**index for index, (size, seconds) in enumerate(TIMES.mixed.items())
    }
    chooser = budget(replace(TIMES, mixed=mixed), max_itl=10.0)
    pending = [Prompt(0, tokens) for tokens in prompts]
    waiting = sum(prompts) * (1 + queued / len(prompts))
    pace = min(waiting / budgets.PREFILL_HORIZON_STEPS, sum(prompts), SIZES[-1] - streams)
    read = mean_chunk(streams, pending, chooser, queued=queued)
    assert read >= pace - SIZES[-1] / MANY, "but for what is left for a large one"


def test_prompts_that_wait_are_read_at_the_least_price() -> None:
    """Some steps of 256 tokens, which are cheap, and some of 2,048, rather than all of 1,024."""
    times = replace(TIMES, mixed={**TIMES.mixed, 1024: 19 * MS})
    chooser = budget(times, max_itl=1.0)
    pending = [Prompt(0, 7000)] * 4
    chunks = {chooser.chunk_tokens(Decodes(8, 0), pending) for _ in range(50)}
    assert chunks == {256 - 8, 2048 - 8}


def test_a_chunk_that_need_not_be_so_large_leaves_half_of_the_limit() -> None:
    times = replace(TIMES, mixed={**TIMES.mixed, 1024: 19 * MS})
    chooser = budget(times, max_itl=50 * MS)
    chunks = {chooser.chunk_tokens(Decodes(8, 0), [Prompt(0, 7000)] * 4) for _ in range(50)}
    assert chunks == {256 - 8, 1024 - 8}


def test_chunks_of_a_prompt_do_not_shrink_as_it_is_read() -> None:
    means = {mean_chunk(8, [Prompt(read, 36_000 - read, read)]) for read in (0, 18_000, 34_000)}
    assert len(means) == 1
    assert means.pop() == pytest.approx(36_000 / budgets.PREFILL_HORIZON_STEPS, rel=0.03)


def test_what_was_found_in_the_cache_makes_no_chunk_larger() -> None:
    found = Prompt(32_000, 1000)
    assert budget(max_itl=1.0).chunk_tokens(Decodes(8, 0), [found]) == 256 - 8


def test_a_chunk_twice_as_large_has_to_be_8_percent_cheaper_while_sequences_decode() -> None:
    def chunk(seconds: float) -> int:
        times = replace(TIMES, mixed={**TIMES.mixed, 64: seconds})
        return budget(times).chunk_tokens(Decodes(8, 0), [Prompt(0, 1000)])

    # Beside eight decodes a bucket of 256 takes 8.87 µs per prompt token beyond their 4.2 ms.
    limit = 1.08 ** math.log2((256 - 8) / (64 - 8))
    assert chunk(4.2 * MS - 0.4 * MS + 56 * (limit - 0.01) * 8.87e-6) == 64 - 8
    assert chunk(4.2 * MS - 0.4 * MS + 56 * (limit + 0.01) * 8.87e-6) == 256 - 8


def test_no_bucket_beyond_the_limit_while_sequences_decode() -> None:
    prompts = [Prompt(0, 16_384)] * 64
    assert budget().chunk_tokens(Decodes(8, 0), prompts) == 2048 - 8
    assert budget(max_itl=30 * MS).chunk_tokens(Decodes(8, 0), prompts) == 1024 - 8
    assert budget(max_itl=30 * MS).chunk_tokens(IDLE, prompts) == 2048


def test_two_steps_are_within_the_limit_where_a_sequence_follows_a_grammar() -> None:
    """It gets a token in one of two, so that both count: with prompts beside it or not."""
    prompts = [Prompt(0, 16_384)] * 64
    assert budget(max_itl=80 * MS).chunk_tokens(Decodes(8, 0, 1), prompts) == 2048 - 8
    for decodes in (Decodes(8, 0, 1), Decodes(0, 0, 1)):
        assert budget().chunk_tokens(decodes, prompts) == 1024 - decodes.rows
    assert budget(max_itl=MS).chunk_tokens(Decodes(0, 0, 1), prompts) == 256, "prompts advance"


def test_context_before_the_chunk_counts_against_the_limit() -> None:
    far = [Prompt(15_000, 16_384)] * 64  # 34 + 30 ms
    assert budget().chunk_tokens(Decodes(8, 0), far) == 1024 - 8


def test_a_limit_below_the_decode_step_still_lets_prompts_advance() -> None:
    assert budget(max_itl=MS).chunk_tokens(Decodes(8, 0), [Prompt(0, 4000)]) == 256 - 8
    assert budget(max_itl=MS).chunk_tokens(Decodes(255, 0), [Prompt(0, 4000)]) >= 1


def test_a_step_full_of_decodes_has_no_room() -> None:
    assert budget().chunk_tokens(Decodes(2048, 0), [Prompt(0, 10)]) == 0


@example(wanted=1621, rows=1, seconds=[1, 3, 7, 22, 41])
@given(
    wanted=st.integers(1, 4096),
    rows=st.sampled_from([0, 1, 15, 63, 200]),
    seconds=st.lists(st.integers(1, 60), min_size=len(SIZES), max_size=len(SIZES)).map(sorted),
)
def test_filling_bucket_after_bucket_is_about_as_fast_as_can_be(
    wanted: int, rows: int, seconds: list[int]
) -> None:
    """Against the best of all ways to compute a number of prompt tokens."""
    mixed = {size: s * MS for size, s in zip(SIZES, seconds, strict=True)}
    times = StepTimes(decode={256: 0.5 * MS}, mixed=mixed)
    chooser = budget(times, max_itl=1.0)
    decode = times.of_decode(rows, 0) if rows else 0.0

    def cost(size: int) -> float:
        return mixed[size] + rows * (mixed[size] - decode)

    @cache
    def best(left: int) -> float:
        if left <= 0:
            return 0.0
        return min(
            cost(size) + (0.0 if size - rows >= left else best(left - (size - rows)))
            for size in SIZES[-3:]
            if size > rows
        )

    took, left = 0.0, wanted
    for _ in itertools.count():
        if left <= 0:
            break
        chunk = min(chooser.chunk_tokens(Decodes(rows, 0), [Prompt(0, left)]), left)
        if not chunk:  # only now and then
            chunk = min(chooser.chunk_tokens(Decodes(rows, 0), [Prompt(0, left)]), left)
        assert chunk >= 1
        bucket = next(size for size in SIZES if size >= chunk + rows)
        took += cost(bucket)
        left -= chunk
    # Beside decodes chunks follow a pace, too, which may cost a little more than that.
    assert took <= 1.02 * best(wanted) + max(map(cost, SIZES))
