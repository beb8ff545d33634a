"""The device computes what the plan says, whatever else it computes and wherever it puts it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api import MAX_LOGPROBS, SamplingParams
from jaxserve.plan import Sampled, StepPlan
from jaxserve.runner.runner import Runner
from jaxserve_kernels.sampler import RowSampling
from jaxserve_kernels.sampler.reference import choose
from tests.runner.driver import (
    CONFIG,
    FEATURES,
    GREEDY,
    METRICS,
    OTHER,
    PROMPT,
    SAMPLED,
    SAMPLED_VOCAB,
    Placed,
    assert_same,
    certain,
    first_token,
    generate,
    plan,
    step,
    tokens_of,
)
from tests.tiny_model import COMPILES, SPEC


def test_a_plan_that_no_bucket_holds_is_refused_with_its_lengths(runner: Runner) -> None:
    most = CONFIG.buckets.prefill[-1]
    with pytest.raises(ValueError, match=rf"no mixed bucket .* \[{most + 1}\] tokens"):
        runner.launch(plan([Placed().chunk([1] * (most + 1))]))


# One sequence.


@pytest.mark.parametrize("split", range(1, len(PROMPT)))
def test_a_prompt_in_two_chunks_is_the_prompt(runner: Runner, split: int) -> None:
    whole = first_token(runner, Placed(), PROMPT)
    seq = Placed(slot=1, pages=(11, 12, 13))
    nothing = step(runner, [seq.chunk(PROMPT[:split], samples=False)], [seq])
    assert nothing == [None]
    assert_same(step(runner, [seq.chunk(PROMPT[split:], split)])[0], whole)


def test_a_prompt_token_by_token_is_the_prompt(runner: Runner) -> None:
    whole = first_token(runner, Placed(), PROMPT)
    seq = Placed(slot=3, pages=(11, 12, 13))
    last = None
    for start, token in enumerate(PROMPT):
        admit = [seq] if start == 0 else []
        last = step(runner, [seq.chunk([token], start)], admit)[0]
    assert_same(last, whole)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_decoding_is_the_prefill_of_a_longer_prompt(runner: Runner, params: SamplingParams) -> None:
    """Sampling too: the random numbers belong to the position, not to how it was reached."""
    seq = Placed(params=params)
    decoded = generate(runner, seq, PROMPT, 12)
    tokens = tokens_of(decoded)
    for count, expected in enumerate(decoded):
        again = first_token(runner, Placed(slot=2, params=params), PROMPT + tuple(tokens[:count]))
        assert_same(again, expected)


def test_prompts_over_several_buckets_agree(runner: Runner) -> None:
    """8 tokens fill the smaller bucket; the ninth needs the larger one."""
    tokens = tuple(range(20, 40))
    for length in (7, 8, 9, 20):
        at_once = first_token(runner, Placed(), tokens[:length])
        seq = Placed(slot=1)
        step(runner, [seq.chunk(tokens[:3], samples=False)], [seq])
        assert_same(step(runner, [seq.chunk(tokens[3:length], 3)])[0], at_once)
    buckets = {used["used"]: used["bucket"] for used in METRICS.steps}
    assert {used: int(name) for used, name in buckets.items()} == {
        7: 8, 8: 8, 9: 32, 20: 32, 3: 8, 4: 8, 5: 8, 6: 8, 17: 32,
    }  # fmt: skip


def test_a_step_may_be_launched_before_the_one_before_it_is_read(runner: Runner) -> None:
    """Only the device knows the tokens that these decode rows compute."""
    expected = generate(runner, Placed(), PROMPT, 9)
    seq = Placed(slot=1, pages=(20, 21, 22, 23, 24))
    in_flight = runner.launch(plan([seq.chunk(PROMPT)], [seq]))
    for index, start in enumerate(range(len(PROMPT), len(PROMPT) + 8)):
        launched = runner.launch(plan([seq.decode(start)]))
        assert_same(runner.collect(in_flight)[0], expected[index])
        in_flight = launched
    assert_same(runner.collect(in_flight)[0], expected[8])


def test_results_that_nobody_read_are_gone_two_steps_later(runner: Runner) -> None:
    """Their memory is that of the later step's: an error, not another step's tokens; or their own,
    where the host had its copy by then."""
    expected = generate(runner, Placed(), PROMPT, 1)[0]
    seq = Placed()
    unread = runner.launch(plan([seq.chunk(PROMPT)], [seq]))
    for start in range(len(PROMPT), len(PROMPT) + 2):
        runner.launch(plan([seq.decode(start)]))
    try:
        found = runner.collect(unread)[0]
    except RuntimeError as error:
        assert "deleted" in str(error)
    else:
        assert_same(found, expected)


def test_a_row_that_does_not_sample_leaves_the_last_token_alone(runner: Runner) -> None:
    expected = generate(runner, Placed(), PROMPT, 3)
    seq = Placed(slot=1)
    first = step(runner, [seq.chunk(PROMPT)], [seq])[0]
    assert step(runner, [seq.chunk(PROMPT[:5], samples=False)]) == [None]
    second = step(runner, [seq.decode(len(PROMPT))])[0]
    assert_same(first, expected[0])
    assert_same(second, expected[1])


def test_only_tokens_of_the_tokenizer_are_sampled_or_reported(runner: Runner) -> None:
    hot = SamplingParams(max_tokens=100, temperature=100.0, seed=1)
    results = generate(runner, Placed(params=hot), PROMPT, 20)
    assert len(set(tokens_of(results))) > 10
    for result in results:
        assert result.logprobs is not None and len(result.logprobs.top) == MAX_LOGPROBS
        assert max(result.token, *(token for token, _ in result.logprobs.top)) < SAMPLED_VOCAB


jitted_choose = jax.jit(choose)
"""Op by op it would compile its loops in every call."""


@pytest.mark.parametrize("length", [1, 4, 11])
def test_the_random_numbers_are_those_of_the_sampled_position(
    compiled: Runner, length: int
) -> None:
    """top_k keeps exactly the tokens whose logprobs are reported: the choice can be repeated."""
    params = SamplingParams(max_tokens=1, temperature=3.0, top_k=MAX_LOGPROBS)
    for seed in range(8):
        seq = Placed(slot=seed % 4, params=replace(params, seed=seed))
        result = first_token(compiled, seq, PROMPT[:length])
        assert result.logprobs is not None
        scores = np.full((1, SPEC.vocab_size), -np.inf, np.float32)
        for token, value in result.logprobs.top:
            scores[0, token] = value
        columns = (True, np.float32(3), 0, np.float32(1), np.float32(0), seed, length)
        rows = RowSampling(*(jnp.asarray([column]) for column in columns))
        assert jitted_choose(jnp.asarray(scores), rows).tolist() == [result.token]


def test_logprobs_describe_the_distribution_before_sampling(runner: Runner) -> None:
    greedy = certain(first_token(runner, Placed(), PROMPT)).logprobs
    hot = replace(SAMPLED, temperature=2.0, seed=3)
    sampled = first_token(runner, Placed(params=hot), PROMPT)
    assert greedy is not None and sampled.logprobs is not None
    assert sampled.logprobs.top == greedy.top
    values = [value for _, value in greedy.top]
    assert values == sorted(values, reverse=True)
    assert greedy.logprob == values[0]
    assert 0 < np.exp(values).sum() < 1


# Several sequences.


def test_sequences_of_one_step_do_not_see_each_other(runner: Runner) -> None:
    """Prefill of one while another decodes, then both decode, then one more joins."""
    expected = generate(runner, Placed(), PROMPT, 6)
    other = generate(runner, Placed(), OTHER, 6)
    a, b = Placed(slot=2, pages=(31, 9, 14, 3, 26)), Placed(slot=0, pages=(5, 30, 6))
    long, short = len(PROMPT), len(OTHER)

    assert_same(step(runner, [a.chunk(PROMPT)], [a])[0], expected[0])
    first, none = step(runner, [a.decode(long), b.chunk(OTHER[:3], samples=False)], [b])
    assert none is None
    assert_same(first, expected[1])
    first, second = step(runner, [a.decode(long + 1), b.chunk(OTHER[3:], 3)])
    assert_same(first, expected[2])
    assert_same(second, other[0])
    for index in range(3):
        rows = [b.decode(short + index), a.decode(long + 2 + index)]
        second, first = step(runner, rows)
        assert_same(first, expected[3 + index])
        assert_same(second, other[1 + index])


def test_results_come_in_the_order_of_the_rows(runner: Runner) -> None:
    prompts = {slot: tuple(range(slot, slot + 5)) for slot in range(4)}
    alone = {slot: first_token(runner, Placed(), prompt) for slot, prompt in prompts.items()}
    placed = {slot: Placed(slot=slot, pages=(2 * slot + 1, 2 * slot + 2)) for slot in prompts}
    order = [2, 0, 3, 1]
    rows = [placed[slot].chunk(prompts[slot], samples=slot != 3) for slot in order]
    results = step(runner, rows, placed.values())
    assert results[2] is None
    for slot, result in zip(order, results, strict=True):
        if slot != 3:
            assert_same(result, alone[slot])


@cache
def generated(runner: Runner, params: SamplingParams, prompt: tuple[int, ...]) -> list[Sampled]:
    """Four tokens, alone on the device."""
    return generate(runner, Placed(params=params), prompt, 4)


@settings(max_examples=40)
@given(data=st.data())
def test_slots_rows_pages_and_neighbours_do_not_matter(
    compiled: Runner, data: st.DataObject
) -> None:
    """Four sequences in random slots, row orders, pages and chunks get what they get alone."""
    prompts = [(1,), PROMPT, OTHER, tuple(range(50, 63))]
    sampling = [data.draw(st.sampled_from(FEATURES)) for _ in prompts]
    expected = [
        generated(compiled, params, prompt)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    slots = data.draw(st.permutations(range(4)))
    pages = data.draw(st.permutations(range(1, 21)))
    placed = [
        Placed(slot=slots[i], pages=tuple(pages[5 * i : 5 * i + 5]), params=sampling[i])
        for i in range(4)
    ]
    done, computed, outputs = [False] * 4, [0] * 4, [list[object]() for _ in range(4)]
    before = COMPILES.count
    while not all(done):
        rows, owners, admit = [], [], []
        for i in data.draw(st.permutations([i for i in range(4) if not done[i]])):
            known = len(prompts[i])
            if computed[i] >= known:
                row = placed[i].decode(computed[i])
            elif (count := min(known - computed[i], 8 - data.draw(st.integers(0, 8)))) == 0:
                continue  # not what the smallest example does: it would never end
            else:
                end = computed[i] + count
                tokens = prompts[i][computed[i] : end]
                row = placed[i].chunk(tokens, computed[i], samples=end == known)
            admit += [placed[i]] if computed[i] == 0 else []
            rows.append(row)
            owners.append(i)
            computed[i] += row.num_tokens
        if not rows:
            continue
        for i, result in zip(owners, step(compiled, rows, admit), strict=True):
            if result is not None:
                assert_same(result, expected[i][len(outputs[i])])
                outputs[i].append(result)
            done[i] = len(outputs[i]) == 4
    assert COMPILES.count == before


@settings(max_examples=60)
@given(data=st.data())
def test_prompts_of_any_length_in_parts_beside_decodes_and_behind_any_hit_are_the_whole(
    compiled: Runner, data: st.DataObject
) -> None:
    """A prompt that shares any of its full pages with one who computed it at once gets the same."""
    size, before = CONFIG.cache.page_size, COMPILES.count
    prompt = data.draw(st.lists(st.integers(0, SAMPLED_VOCAB - 1), min_size=2, max_size=24))
    first = Placed(slot=3, pages=tuple(range(30, 36)))
    whole = first_token(compiled, first, prompt)
    beside = Placed(slot=1, pages=tuple(range(11, 19)), params=SAMPLED)
    expected = generated(compiled, SAMPLED, OTHER)
    decoded = [first_token(compiled, beside, OTHER)]
    hit = data.draw(st.integers(0, (len(prompt) - 1) // size))
    seq = Placed(slot=0, pages=(*first.pages[:hit], *range(1, 9 - hit)))
    start, admit = hit * size, [seq]
    while True:
        end = data.draw(st.integers(start + 1, len(prompt)))
        rows = [seq.chunk(prompt[start:end], start, samples=end == len(prompt))]
        if len(decoded) < len(expected):
            rows.insert(0, beside.decode(len(OTHER) + len(decoded) - 1))
        *others, own = step(compiled, rows, admit)
        decoded += map(certain, others)
        start, admit = end, []
        if own is not None:
            break
    assert_same(own, whole)
    for got, wanted in zip(decoded, expected, strict=False):
        assert_same(got, wanted)
    assert COMPILES.count == before


def test_a_slot_and_its_pages_can_be_given_to_somebody_else(runner: Runner) -> None:
    """While the step of the old owner is in flight: the device works in launch order."""
    expected = generate(runner, Placed(params=SAMPLED), OTHER, 3)
    runner.reset()
    old = Placed(pages=(4, 5, 6))
    new = Placed(pages=(6, 4), params=SAMPLED)
    generate(runner, old, PROMPT, 1)
    in_flight = runner.launch(plan([old.decode(len(PROMPT))]))
    taken = runner.launch(plan([new.chunk(OTHER)], [new]))
    runner.collect(in_flight)
    assert_same(runner.collect(taken)[0], expected[0])
    more = StepPlan(rows=(new.decode(6),))
    assert_same(runner.collect(runner.launch(more))[0], expected[1])


def test_padding_rows_do_not_touch_anybody(runner: Runner) -> None:
    """Three rows in a bucket of four, one row in a bucket of one."""
    alone = generate(runner, Placed(), PROMPT, 4)
    placed = [
        Placed(slot=slot, pages=(1 + 4 * slot, 2 + 4 * slot, 3 + 4 * slot, 4 + 4 * slot))
        for slot in range(3)
    ]
    step(runner, [seq.chunk(PROMPT[:10], samples=False) for seq in placed], placed)
    for result in step(runner, [seq.chunk(PROMPT[10:], 10) for seq in placed]):
        assert_same(result, alone[0])
    for index in range(3):
        for result in step(runner, [seq.decode(len(PROMPT) + index) for seq in placed]):
            assert_same(result, alone[1 + index])
    assert METRICS.steps[-1] == {**METRICS.steps[-1], "kind": "decode", "used": 3, "padded": 4}
