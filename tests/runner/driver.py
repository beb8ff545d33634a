"""Plans by hand: sequences that are placed, fed and read by the test instead of a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.api import SamplingParams
from jaxserve.plan import Admission, PageEntry, Row, Sampled, StepPlan, Verify
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from tests.tiny_model import StubMetrics, make_config

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=100, temperature=1.5, top_k=40, top_p=0.98, seed=12345)
FEATURES = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=0.8),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=3),
    SamplingParams(max_tokens=9, temperature=0.8, top_p=0.5),
    SamplingParams(max_tokens=9, temperature=0.8, min_p=0.1),
    SAMPLED,
]

PROMPT = (5, 71, 8, 8, 96, 0, 33, 12, 60, 41, 2)
OTHER = (90, 3, 17, 64, 64, 7)

SAMPLED_VOCAB, NUM_PAGES = 60, 41
CONFIG = make_config(num_pages=NUM_PAGES, sampled_vocab=SAMPLED_VOCAB)
VERIFY_SHAPES = ((1, 8), (4, 2), (4, 4), (4, 8))
"""Of the fixture `verifying`, which is like `CONFIG` otherwise."""
METRICS = StubMetrics()
"""Of the fixture `runner`, like `CONFIG`."""

TOLERANCE = 2e-5
"""Logprobs of two float32 computations of one thing; 1e-6 to 2e-6 is the worst measured."""


def short(config: RunnerConfig) -> RunnerConfig:
    """With the longest context of the workloads of `test_equivalence`."""
    return replace(config, scheduler=replace(config.scheduler, max_model_len=24))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A sequence in a slot, with the pages of all its tokens."""

    slot: int = 0
    pages: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    params: SamplingParams = GREEDY
    groups: int = 1
    """Cache groups of the model: it has the same pages in all of them."""

    def admission(self, rows: Iterable[Row]) -> Admission:
        """The tokens of its first row are its prompt."""
        tokens = next(row.tokens for row in rows if row.slot == self.slot)
        return Admission(self.slot, self.params, tokens, len(tokens))

    @property
    def entries(self) -> tuple[PageEntry, ...]:
        return tuple(
            PageEntry(self.slot, index, page, group)
            for group in range(self.groups)
            for index, page in enumerate(self.pages)
        )

    def chunk(self, tokens: Sequence[int], start: int = 0, *, samples: bool = True) -> Row:
        return Row(
            seq_id=self.slot,
            slot=self.slot,
            start=start,
            tokens=tuple(tokens),
            samples=samples,
            logprobs=samples,
        )

    def decode(self, start: int) -> Row:
        return self.chunk((), start)

    def verify(
        self,
        start: int,
        drafts: Sequence[int] | None,
        *,
        positions: int = 0,
        end: int = 1000,
        follows: bool = False,
        masks: tuple[bytes, ...] = (),
    ) -> Row:
        """As many positions as its drafts ask for, unless said otherwise."""
        given = None if drafts is None else tuple(drafts)
        asked = Verify(positions or 1 + len(given or ()), end, given, follows, masks)
        return self.decode(start)._replace(verify=asked)


def step(runner: Runner, rows: Iterable[Row], admit: Iterable[Placed] = ()) -> list[Sampled | None]:
    """Launch and collect one step; the sequences in `admit` take their slots and pages first."""
    return runner.collect(runner.launch(plan(rows, admit)))


def plan(rows: Iterable[Row], admit: Iterable[Placed] = ()) -> StepPlan:
    admit, rows = tuple(admit), tuple(rows)
    return StepPlan(
        rows=rows,
        admissions=tuple(seq.admission(rows) for seq in admit),
        pages=tuple(entry for seq in admit for entry in seq.entries),
        verify=any(row.verify is not None for row in rows),
    )


def first_token(runner: Runner, seq: Placed, prompt: Sequence[int]) -> Sampled:
    """What follows the prompt, computed at once."""
    return certain(step(runner, [seq.chunk(prompt)], [seq])[0])


def generate(runner: Runner, seq: Placed, prompt: Sequence[int], count: int) -> list[Sampled]:
    """Alone on the device: prefill, then decode; every token read before the next step."""
    results = [first_token(runner, seq, prompt)]
    for start in range(len(prompt), len(prompt) + count - 1):
        results.append(certain(step(runner, [seq.decode(start)])[0]))
    return results


def tokens_of(results: Iterable[Sampled | None]) -> list[int]:
    return [certain(result).token for result in results]


def several(result: Sampled | None) -> list[Sampled]:
    """All that a verify row yields."""
    first = certain(result)
    return [first._replace(further=()), *first.further]


def certain(result: Sampled | None) -> Sampled:
    assert result is not None
    return result


def assert_same(got: Sampled | None, expected: Sampled | None) -> None:
    """Equal tokens, and equal distributions but for rounding."""
    got, expected = certain(got), certain(expected)
    assert got.token == expected.token
    assert got.logprobs is not None and expected.logprobs is not None
    values = [
        [lp.logprob, *(value for _, value in lp.top)] for lp in (got.logprobs, expected.logprobs)
    ]
    np.testing.assert_allclose(*values, rtol=0, atol=TOLERANCE)
