"""The runner: what it compiles, resets, reports and refuses to believe."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.plan import PageEntry, Sampled, StepPlan
from jaxserve.runner.programs import programs
from jaxserve.runner.runner import Runner
from tests.runner.driver import (
    CONFIG,
    FEATURES,
    METRICS,
    OTHER,
    PROMPT,
    SAMPLED_VOCAB,
    Placed,
    assert_same,
    certain,
    first_token,
    generate,
    plan,
    step,
)
from tests.tiny_model import COMPILES, SPEC, make_config, make_params, make_runner, tiny_spec

ONE_LAYER = tiny_spec(num_layers=1)
"""Where what is special is not in the layers: half of the compiling."""


def test_every_combination_of_features_was_compiled_before(runner: Runner) -> None:
    """The fixture counts: none of this compiles."""
    placed = [
        Placed(slot=slot, pages=(4 * slot + 1, 4 * slot + 2, 4 * slot + 3)) for slot in range(4)
    ]
    for params in FEATURES:
        for count in (1, 3, 4):
            admit = [replace(seq, params=params) for seq in placed[:count]]
            rows = [seq.chunk(OTHER[:2], samples=index % 2 == 0) for index, seq in enumerate(admit)]
            step(runner, rows, admit)
            quiet = [row._replace(logprobs=False) for row in rows]
            step(runner, quiet)
            step(runner, [seq.decode(2)._replace(logprobs=count == 3) for seq in admit])
    runner.reset()


def test_more_changes_than_a_step_holds_are_applied_before_it(runner: Runner) -> None:
    """A decode step of one row holds one update; moving a sequence to other pages takes four."""
    expected = generate(runner, Placed(), PROMPT, 2)
    seq = Placed(slot=1, pages=(20, 21, 22))
    step(runner, [seq.chunk(PROMPT)], [seq])
    twin = Placed(slot=2, pages=(25, 26, 27))
    step(runner, [twin.chunk(PROMPT)], [twin])
    moves = tuple(PageEntry(1, index, page) for index, page in enumerate(twin.pages))
    moved = StepPlan(rows=(seq.decode(len(PROMPT)),), pages=moves)
    assert_same(runner.collect(runner.launch(moved))[0], expected[1])
    step(runner, [seq.chunk([70] * 11, samples=False)])  # goes to the twin's pages now
    again = step(runner, [twin.decode(len(PROMPT))])[0]
    assert certain(again).logprobs != certain(expected[1]).logprobs


def test_page_tables_of_thousands_of_pages_arrive_whole() -> None:
    """More changes than one call of the overflow executable holds."""
    config = make_config(
        spec=ONE_LAYER,
        max_model_len=9000,
        page_size=1,
        num_pages=9001,
        decode=(1,),
        prefill=(4,),
        max_num_seqs=1,
    )
    runner = make_runner(config)
    before = COMPILES.count
    pages = tuple(np.random.default_rng(0).permutation(np.arange(1, 9001)).tolist())
    seq = Placed(pages=pages)
    runner.launch(plan([seq.chunk([1, 2, 3])], [seq]))
    table = np.asarray(runner._state.sequences)[0, 16:]  # pyright: ignore[reportPrivateUsage]
    assert tuple(table.tolist()) == pages
    assert COMPILES.count == before


def test_reset_forgets_everything_and_works_again(runner: Runner) -> None:
    """Also after a step failed when its buffers were already donated."""
    expected = generate(runner, Placed(), PROMPT, 3)
    for leaf in jax.tree.leaves(runner._state):  # pyright: ignore[reportPrivateUsage]
        leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        step(runner, [Placed().decode(len(PROMPT))])
    runner.reset()
    for got, want in zip(generate(runner, Placed(), PROMPT, 3), expected, strict=True):
        assert_same(got, want)


def test_reset_gives_the_old_memory_back_before_it_takes_new(runner: Runner) -> None:
    """The KV cache takes all the memory there is: two of them do not fit."""
    old = jax.tree.leaves(runner._state)  # pyright: ignore[reportPrivateUsage]
    runner.reset()
    assert all(leaf.is_deleted() for leaf in old)


def test_steps_are_reported_with_the_bucket_they_ran_in(runner: Runner) -> None:
    generate(runner, Placed(), PROMPT, 2)
    prefill, decode = METRICS.steps
    assert (prefill["kind"], prefill["bucket"], prefill["used"]) == ("mixed", "32", len(PROMPT))
    assert (decode["kind"], decode["bucket"], decode["used"]) == ("decode", "1", 1)
    assert prefill["padded"] == 32 and prefill["seconds"] > 0


def test_a_step_launched_after_the_one_before_it_had_ended_is_late(runner: Runner) -> None:
    seq = Placed()
    first = runner.launch(plan([seq.chunk(PROMPT)], [seq]))
    first.results.block_until_ready()
    second = runner.launch(plan([seq.decode(len(PROMPT))]))
    runner.collect(first)
    runner.collect(second)
    runner.collect(runner.launch(plan([seq.decode(len(PROMPT) + 1)])))  # nothing was in flight
    assert [step["late"] for step in METRICS.steps] == [False, True, False]


def test_a_mixed_bucket_of_one_token_computes_the_token_it_is_given() -> None:
    config = make_config(
        spec=ONE_LAYER,
        max_num_seqs=1,
        decode=(1,),
        prefill=(1, 32),
        sampled_vocab=SAMPLED_VOCAB,
    )
    runner = make_runner(config)
    whole = first_token(runner, Placed(), PROMPT)
    seq = Placed(pages=(9, 10, 11))
    step(runner, [seq.chunk(PROMPT[:10], samples=False)], [seq])
    assert_same(step(runner, [seq.chunk(PROMPT[10:], 10)])[0], whole)


def test_logits_that_are_not_numbers_give_no_token() -> None:
    spec = replace(ONE_LAYER, tie_embeddings=False)
    params = make_params(spec)
    assert isinstance(params.embedding, jax.Array)
    params = params._replace(embedding=params.embedding.at[7].set(jnp.nan))
    runner = make_runner(make_config(spec=spec, decode=(2,), prefill=(8,)), params)
    spoiled, sound = Placed(pages=(1, 2)), Placed(slot=1, pages=(3, 4))
    rows = [spoiled.chunk((3, 7)), sound.chunk((3, 8, 9))]
    found = step(runner, rows, [spoiled, sound])
    assert found[0] == Sampled(None)
    assert certain(found[1]).token is not None


def test_scores_of_the_vocabulary_are_computed_for_rows_and_not_for_tokens() -> None:
    """A step of 32 tokens has four rows at most."""
    mixed = next(each for each in programs(CONFIG, make_params()) if "mixed_32" in each.name)
    lowered = jax.jit(mixed.function).lower(*mixed.arguments).as_text()
    scores = re.findall(rf"tensor<(\d+)x{SPEC.vocab_size}xf32>", lowered)
    assert max(map(int, scores)) == CONFIG.scheduler.max_num_seqs


def test_scratch_memory_of_the_largest_step_is_known(runner: Runner) -> None:
    assert runner.temp_bytes() > 0
