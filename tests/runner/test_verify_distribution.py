"""Verified tokens are distributed as plain ones, for requests whose seeds nobody chose."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from jaxserve.api import SamplingParams
from jaxserve.runner.runner import Runner
from tests.runner.driver import Placed, several, step, tokens_of

PROMPT = (5, 71, 8, 8)
ALLOWED = (20, 21, 22, 23)
DRAFTS = (21, 22)
RUNS = 450
SLOTS = 3


@pytest.fixture
def runner(verifying: Runner) -> Runner:
    verifying.reset()
    return verifying


def outcomes(runner: Runner, seeds: Random, *, drafted: bool) -> list[tuple[int, ...]]:
    """The second to the fourth token of each run. Of the drafts some are accepted by chance."""
    found: list[tuple[int, ...]] = []
    for _ in range(RUNS // SLOTS):
        seqs = [
            Placed(
                slot=slot,
                pages=(8 * slot + 1, 8 * slot + 2, 8 * slot + 3),
                params=SamplingParams(
                    max_tokens=9, seed=seeds.getrandbits(32), allowed_token_ids=ALLOWED
                ),
            )
            for slot in range(SLOTS)
        ]
        step(runner, [seq.chunk(PROMPT) for seq in seqs], seqs)
        got: list[list[int]] = [[] for _ in seqs]
        while any(len(tokens) < 3 for tokens in got):
            rows = [
                seq.verify(len(PROMPT) + len(tokens), DRAFTS)
                if drafted
                else seq.decode(len(PROMPT) + len(tokens))
                for seq, tokens in zip(seqs, got, strict=True)
            ]
            for tokens, result in zip(got, step(runner, rows), strict=True):
                tokens += [token for token in tokens_of(several(result)) if token is not None]
        found += [tuple(tokens[:3]) for tokens in got]
    return found


def differ(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """How probable it is that samples of one distribution differ as much in any place."""
    from scipy.stats import chi2_contingency  # takes a second, which each process would wait for

    least = 1.0
    for place in range(3):
        counts = [Counter(run[place] for run in runs) for runs in (one, other)]
        table = [[count[token] for token in ALLOWED] for count in counts]
        least = min(least, float(chi2_contingency(table).pvalue))
    return min(1.0, 3 * least)


def test_tokens_that_are_verified_have_the_distribution_of_others(runner: Runner) -> None:
    plain = outcomes(runner, Random(1), drafted=False)
    drafted = outcomes(runner, Random(3), drafted=True)
    assert differ(plain, drafted) > 0.001
    hopeful = [
        (DRAFTS[0], *rest) if number % 4 == 0 else (first, *rest)
        for number, (first, *rest) in enumerate(drafted)
    ]
    assert differ(plain, hopeful) < 1e-6, "a draft that is taken for granted is noticed"
