"""Rejected drafts leave no trace in KVarN's pages, which cannot be encoded again once they are
left. `test_recurrent_drafts` and `test_mtp_steps` ask the same of recurrent state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.driver import PROMPT, SAMPLED_VOCAB, Placed, certain, several, step, tokens_of
from tests.tiny_model import make_config, make_runner

PAGE, POSITIONS, START, END = 4, 8, len(PROMPT), 30
SEQ = Placed()


class Left(NamedTuple):
    """By what a row yields, and what the cache holds behind it."""

    tokens: list[int]
    logprobs: list[float]
    cache: list[np.ndarray]


@pytest.fixture(scope="module")
def runner() -> Runner:
    config = make_config(
        num_pages=21, decode=(1,), prefill=(24,), verify=((1, POSITIONS),), max_model_len=32
    )
    return make_runner(replace(config, kv_format=KVarN(value_bits=2, group=PAGE)))


def written(runner: Runner, known: list[int], right: int, rejected: int | None) -> list[Left]:
    """Rows whose first `right` drafts are those of `known`, which follow the prompt.

    Args:
      rejected: what is added to the others; None: there are no others.
    """
    runner.reset()
    got = [certain(step(runner, [SEQ.chunk(PROMPT)], [SEQ])[0])]
    found = list[Left]()
    while START + len(got) - 1 < END:
        ahead = known[len(got) :][: POSITIONS - 1]
        wrong = [] if rejected is None else ahead[right:]
        drafts = [*ahead[:right], *((each + (rejected or 0)) % SAMPLED_VOCAB for each in wrong)]
        row = several(step(runner, [SEQ.verify(START + len(got) - 1, drafts)])[0])
        got += row
        logprobs = [each.logprobs.logprob for each in row if each.logprobs]
        assert len(logprobs) == len(row)
        found.append(Left(tokens_of(row), logprobs, held(runner, START + len(got) - 1)))
    return found


def held(runner: Runner, length: int) -> list[np.ndarray]:
    """The pages behind the first that are full; the first, and the last one up to `length`, as the
    slot has them."""
    state: Any = runner._state  # pyright: ignore[reportPrivateUsage]
    kv, full = state.kv[0], list(SEQ.pages[1 : length // PAGE])
    sink, tail = (np.asarray(kv.raw)[:, SEQ.slot, place] for place in (0, 1))
    encoded = (np.asarray(each)[:, full] for each in (kv.key_words, kv.value_words, kv.scales))
    return [*encoded, sink, tail[..., : length % PAGE, :]]


@pytest.mark.slow
def test_pages_have_the_bits_that_they_have_without_what_was_rejected(runner: Runner) -> None:
    """For every number of drafts that are right, in and at the ends of pages."""
    known = [each for row in written(runner, [], 0, None) for each in row.tokens]
    known = [*tokens_of(step(runner, [SEQ.chunk(PROMPT)], [SEQ])), *known]
    lengths = set[int]()
    for right in range(POSITIONS - 1):
        expected = written(runner, known, right, None)
        for rejected in (1, 7):
            got = written(runner, known, right, rejected)
            for one, other in zip(got, expected, strict=True):
                assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
                for found, wanted in zip(one.cache, other.cache, strict=True):
                    np.testing.assert_array_equal(found, wanted)
        lengths |= {len(each.tokens) for each in expected}
    assert lengths == set(range(1, PAGE + 1)), "no row leaves its page"
