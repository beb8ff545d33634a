"""A small draft model in the steps: its drafts, prefixes, and that no answer changes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.api import SamplingParams
from jaxserve.models import decoder
from jaxserve.models.drafts.spec import ModelDraft
from jaxserve.plan import PageMove, PageMoves
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.runner import Runner
from tests.runner.driver import GREEDY, PROMPT, Placed, first_token, generate, step, tokens_of
from tests.runner.test_draft_steps import (
    KINDS,
    PAGES,
    VOCAB,
    assert_all_accepted,
    assert_lossless,
    drafts_on_device,
    runner_config,
)
from tests.tiny_model import StubMetrics, make_config, make_params, make_runner, tiny_spec

TARGET = tiny_spec(tie_embeddings=False)
SMALL = tiny_spec(
    vocab_size=92, embed=16, ffn=24, q_heads=2, kv_heads=1, qk_norm=False, tie_embeddings=False
)
"""Of other sizes than the target, and with fewer rows of padding."""


def served(body: Any, weights: decoder.Params) -> Runner:
    draft = ModelDraft(body=body, num_drafts=3)
    config = replace(runner_config(TARGET), draft=draft, rings=Rings(store=4, load=4))
    sink: Any = StubMetrics()
    runner = Runner(config, make_params(TARGET, 4), sink, weights)
    runner.compile(2, lambda name, done: None)
    return runner


@pytest.fixture(scope="module")
def random() -> Runner:
    return served(SMALL, make_params(SMALL, 9))


@pytest.fixture(scope="module")
def perfect() -> Runner:
    """The target drafts for itself."""
    return served(TARGET, make_params(TARGET, 4))


@pytest.fixture(scope="module")
def small() -> Runner:
    """The draft model alone."""
    config = make_config(spec=SMALL, decode=(3,), prefill=(16,), num_pages=41, sampled_vocab=VOCAB)
    return make_runner(config, make_params(SMALL, 9))


def alone(small: Runner, tokens: Sequence[int], count: int) -> list[int]:
    """What the draft model itself says after the tokens."""
    small.reset()
    seq = Placed(slot=0, pages=PAGES[0], params=GREEDY)
    if len(tokens) <= 16:
        return tokens_of(generate(small, seq, tokens, count))
    step(small, [seq.chunk(tokens[:16], samples=False)], [seq])
    found = tokens_of(step(small, [seq.chunk(tokens[16:], 16)]))
    for start in range(len(tokens), len(tokens) + count - 1):
        found += tokens_of(step(small, [seq.decode(start)]))
    return found


def test_the_drafts_on_the_device_are_what_the_draft_model_says(
    random: Runner, small: Runner
) -> None:
    """After chunks, a decode step, and verify steps with drafts accepted and rejected."""
    random.reset()
    seq = Placed(slot=2, pages=PAGES[2])
    expected = [*PROMPT, *tokens_of(generate(random, seq, PROMPT, 12))]
    random.reset()
    step(random, [seq.chunk(PROMPT[:5], samples=False)], [seq])
    tokens = [*PROMPT, *tokens_of(step(random, [seq.chunk(PROMPT[5:], 5)]))]
    tokens += tokens_of(step(random, [seq.decode(len(tokens) - 1)]))
    for right in (0, 3, 1):
        start = len(tokens) - 1
        given = [*expected[start + 1 :][:right], 1, 2, 3][:3]
        (result,) = step(random, [seq.verify(start, given, positions=4, end=32)])
        assert result is not None and result.token is not None
        tokens += [result.token, *tokens_of(result.further)]
        assert tokens == expected[: len(tokens)]
        drafts = alone(small, tokens, 3)
        assert drafts_on_device(random, 2) == (len(tokens), drafts)


def test_a_cached_prefix_is_the_draft_models_too(random: Runner, small: Runner) -> None:
    random.reset()
    first = Placed(slot=0, pages=PAGES[0])
    first_token(random, first, PROMPT[:9])
    assert_drafts_behind(random, small, (*PAGES[0][:2], *PAGES[2][:6]))


def test_pages_that_come_back_from_a_tier_are_the_draft_models_too(
    random: Runner, small: Runner
) -> None:
    random.reset()
    first_token(random, Placed(slot=0, pages=PAGES[0]), PROMPT[:9])
    mover = random.mover
    assert mover is not None
    random.move_pages(PageMoves((), (PageMove(PAGES[0][0], 0), PageMove(PAGES[0][1], 1))))
    mover.settle()
    for one, other in zip(mover.store_ring()[0], mover.load_ring()[0], strict=True):
        ctypes.memmove(other.address, one.address, 2 * one.slot_bytes)
    random.move_pages(PageMoves((PageMove(PAGES[2][0], 0), PageMove(PAGES[2][1], 1)), ()))
    assert_drafts_behind(random, small, PAGES[2])


def assert_drafts_behind(random: Runner, small: Runner, pages: tuple[int, ...]) -> None:
    """Behind two pages of PROMPT that the sequence has not computed itself."""
    second, tail = Placed(slot=1, pages=pages), (77, 30)
    tokens = [*PROMPT[:8], *tail, *tokens_of(step(random, [second.chunk(tail, 8)], [second]))]
    tokens += tokens_of(step(random, [second.verify(len(tokens) - 1, None, positions=4)]))
    assert drafts_on_device(random, 1) == (len(tokens), alone(small, tokens, 3))


@pytest.mark.slow
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_model_that_drafts_for_itself_has_every_draft_accepted(
    perfect: Runner, params: SamplingParams
) -> None:
    assert_all_accepted(perfect, params)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_what_is_accepted_is_what_plain_decoding_yields(
    random: Runner, params: SamplingParams
) -> None:
    assert_lossless(random, params)
