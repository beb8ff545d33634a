"""What requests change about the scores, and what they are told of their prompts' scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.api import MAX_LOGPROBS, SamplingParams
from jaxserve.plan import Scored
from jaxserve.runner.runner import Runner
from tests.runner.driver import (
    GREEDY,
    OTHER,
    PROMPT,
    TOLERANCE,
    Placed,
    assert_same,
    certain,
    first_token,
    generate,
    plan,
    step,
    tokens_of,
)


def test_a_strong_frequency_penalty_never_samples_a_token_twice(runner: Runner) -> None:
    params = replace(GREEDY, frequency_penalty=1e6)
    tokens = tokens_of(generate(runner, Placed(params=params), PROMPT, 20))
    assert len(set(tokens)) == 20
    assert set(tokens) & set(PROMPT), "tokens that were only read are not penalised"


def test_a_repetition_penalty_counts_the_prompt(runner: Runner) -> None:
    """Tokens of the prompt come last: after it every other token was sampled once."""
    params = replace(
        GREEDY, repetition_penalty=1e6, logit_bias=tuple((t, 100.0) for t in range(60))
    )
    seq = Placed(params=params, pages=tuple(range(1, 9)))
    tokens = tokens_of(generate(runner, seq, PROMPT, 20))
    assert len(set(tokens)) == 20 and not set(tokens) & set(PROMPT)


def test_penalties_are_those_of_the_sequence_that_has_the_slot_now(runner: Runner) -> None:
    params = replace(GREEDY, frequency_penalty=1.5, presence_penalty=0.5)
    expected = generate(runner, Placed(params=params), PROMPT, 8)
    assert tokens_of(expected) != tokens_of(generate(runner, Placed(), PROMPT, 8))
    generate(runner, Placed(params=params), OTHER, 12)
    for got, alone in zip(
        generate(runner, Placed(params=params), PROMPT, 8), expected, strict=True
    ):
        assert_same(got, alone)


def test_output_before_a_preemption_is_counted_as_output(runner: Runner) -> None:
    params = replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.2)
    expected = generate(runner, Placed(params=params), PROMPT, 10)
    known = (*PROMPT, *tokens_of(expected[:6]))
    seq = Placed(slot=2, params=params)
    chunk = plan([seq.chunk(known)], [seq])
    admission = chunk.admissions[0]._replace(num_prompt=len(PROMPT))
    again = [*runner.collect(runner.launch(replace(chunk, admissions=(admission,))))]
    again += [step(runner, [seq.decode(len(known) + i)])[0] for i in range(3)]
    for got, alone in zip(again, expected[6:], strict=True):
        assert_same(got, alone)


def test_biased_tokens_are_the_only_ones_or_none(runner: Runner) -> None:
    hot = SamplingParams(max_tokens=100, temperature=2.0, seed=4)
    wanted = replace(hot, logit_bias=((50, 1e4), (7, 1e4)))
    assert set(tokens_of(generate(runner, Placed(params=wanted), PROMPT, 16))) == {7, 50}
    unwanted = replace(hot, logit_bias=tuple((token, -1e4) for token in range(50)))
    assert min(tokens_of(generate(runner, Placed(params=unwanted), PROMPT, 16))) >= 50


def test_stop_tokens_are_not_sampled_before_the_minimum(runner: Runner) -> None:
    stops = frozenset(range(5, 60))
    params = SamplingParams(
        max_tokens=100, temperature=1.0, seed=1, min_tokens=12, stop_token_ids=stops
    )
    tokens = tokens_of(generate(runner, Placed(params=params), PROMPT, 20))
    assert not stops & set(tokens[:12])
    assert stops & set(tokens[12:])


def test_masks_of_rows_and_of_sequences_leave_only_what_they_allow(runner: Runner) -> None:
    hot = SamplingParams(max_tokens=100, temperature=5.0, seed=2)
    allowed = Placed(params=replace(hot, allowed_token_ids=(3, 31, 32, 59)))
    assert set(tokens_of(generate(runner, allowed, PROMPT, 24))) == {3, 31, 32, 59}

    others = Placed(slot=1, pages=(11, 12, 13, 14, 15, 16), params=hot)
    mask = (1 << 20 | 1 << 33).to_bytes(8, "little")
    masked = Placed(slot=3, params=hot)
    rows = [masked.chunk(PROMPT)._replace(mask=mask), others.chunk(PROMPT)]
    expected = tokens_of(generate(runner, Placed(params=hot), PROMPT, 6))
    seen = []
    for index in range(6):
        results = tokens_of(step(runner, rows, [masked, others] if index == 0 else []))
        seen.append(results)
        start = len(PROMPT) + index
        rows = [masked.decode(start)._replace(mask=mask), others.decode(start)]
    assert {token for token, _ in seen} == {20, 33}
    assert [token for _, token in seen] == expected, "a neighbour's mask is not ours"
    unmasked = tokens_of(step(runner, [masked.decode(len(PROMPT) + 6)]))
    assert not set(unmasked) & {20, 33}


def test_logprobs_are_those_of_the_model_whatever_is_adjusted(runner: Runner) -> None:
    plain = certain(first_token(runner, Placed(), PROMPT)).logprobs
    params = replace(GREEDY, logit_bias=((50, 100.0),), repetition_penalty=3.0)
    adjusted = first_token(runner, Placed(params=params), PROMPT)
    assert plain is not None and adjusted.logprobs is not None
    assert adjusted.token == 50
    assert adjusted.logprobs.top == plain.top
    assert adjusted.logprobs.logprob < plain.logprob


# Logprobs of prompts.


def test_a_prompt_token_is_as_likely_as_it_would_be_as_the_next_token(runner: Runner) -> None:
    """Whatever chunk it is in and whoever else is scored in the same step."""
    tail = Scored(0, PROMPT[6:], MAX_LOGPROBS)
    a, b = Placed(), Placed(slot=1, pages=(11, 12, 13))
    head = a.chunk(PROMPT[:5], samples=False)._replace(scored=Scored(0, PROMPT[1:6], MAX_LOGPROBS))
    other = b.chunk(OTHER)._replace(scored=Scored(2, OTHER[3:], 3))
    first, sampled = step(runner, [head, other], [a, b])
    (second,) = step(runner, [a.chunk(PROMPT[5:], 5)._replace(scored=tail)])
    assert first is not None and first.token is None
    scores = [*first.prompt_logprobs, *certain(second).prompt_logprobs]
    assert len(scores) == len(PROMPT) - 1
    for count, score in enumerate(scores, 1):
        alone = first_token(runner, Placed(slot=2, pages=(21, 22, 23)), PROMPT[:count]).logprobs
        assert alone is not None
        values = [value for _, value in alone.top]
        np.testing.assert_allclose([v for _, v in score.top], values, rtol=0, atol=TOLERANCE)
        assert [token for token, _ in score.top] == [token for token, _ in alone.top]
        if PROMPT[count] in dict(alone.top):
            assert abs(score.logprob - dict(alone.top)[PROMPT[count]]) < TOLERANCE
            assert score.rank == 1 + [token for token, _ in alone.top].index(PROMPT[count])
        else:
            assert score.rank > MAX_LOGPROBS and score.logprob < values[-1]
    assert [len(score.top) for score in certain(sampled).prompt_logprobs] == [3] * 3


def test_a_long_prompt_is_scored_in_several_calls(runner: Runner) -> None:
    """28 positions in calls of 4 rows."""
    prompt = tuple(range(1, 30))
    seq = Placed()
    row = seq.chunk(prompt)._replace(scored=Scored(0, prompt[1:], 1))
    whole = certain(step(runner, [row], [seq])[0]).prompt_logprobs
    assert len(whole) == 28
    seq = Placed(slot=1)
    parts = []
    for start in range(0, 29, 7):
        end = min(start + 7, 29)
        scored = Scored(0, prompt[start + 1 : end + 1], 1)
        rows = [seq.chunk(prompt[start:end], start, samples=end == 29)._replace(scored=scored)]
        parts += certain(step(runner, rows, [seq] if start == 0 else [])[0]).prompt_logprobs
    values = [[score.logprob for score in scores] for scores in (whole, parts)]
    np.testing.assert_allclose(*values, rtol=0, atol=TOLERANCE)
