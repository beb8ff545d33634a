"""Drafts of a model with delta nets: what is rejected leaves no trace in their state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import SamplingParams
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Verification
from jaxserve_kernels.recurrent_state import RecurrentState
from tests.runner.driver import (
    GREEDY,
    PROMPT,
    SAMPLED,
    TOLERANCE,
    Placed,
    assert_same,
    certain,
    generate,
    several,
    step,
    tokens_of,
)
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, workloads
from tests.runner.test_recurrent_models import DELTA_NET, FULL, RECURRENT, SPECS, STATE, hybrid
from tests.runner.test_verify import drafts_of
from tests.scheduler.proposers import KINDS, Guesses
from tests.tiny_model import COMPILES, make_config, make_runner, whole_float32

START = len(PROMPT)
BUCKETS = ((4, 8),)
pytestmark = pytest.mark.slow  # `test_mtp_steps` asks the same of a runner with a head


@pytest.fixture(scope="module", params=SPECS)
def config(request: pytest.FixtureRequest) -> RunnerConfig:
    made = make_config(
        spec=SPECS[request.param], decode=(4,), prefill=(24,), verify=BUCKETS, max_model_len=24
    )
    return replace(made, cache=replace(made.cache, **STATE))


@pytest.fixture(scope="module")
def runner(config: RunnerConfig) -> Iterator[Runner]:
    compiled = make_runner(config)
    before = COMPILES.count
    yield compiled
    assert COMPILES.count == before, "something was compiled while serving"


def state_of(runner: Runner, slot: int) -> list[np.ndarray]:
    state: Any = runner._state  # pyright: ignore[reportPrivateUsage]
    own = state.kv[-1]
    assert isinstance(own, RecurrentState)
    return [np.asarray(leaf)[:, slot] for leaf in own]


def states_of_decoding(
    runner: Runner, params: SamplingParams
) -> tuple[list[Any], list[list[np.ndarray]]]:
    """What each step yields, and the state behind it."""
    seq, results, states = Placed(params=params), list[Any](), list[list[np.ndarray]]()
    for done in range(24 - START):
        rows, admit = ([seq.decode(START + done - 1)], []) if done else ([seq.chunk(PROMPT)], [seq])
        results.append(certain(step(runner, rows, admit)[0]))
        states.append(state_of(runner, seq.slot))
    return results, states


def assert_bits_of_plain_decoding(runner: Runner, params: SamplingParams, positions: int) -> None:
    """For every number of accepted drafts, behind rows of every number."""
    expected, states = states_of_decoding(runner, params)
    tokens = tokens_of(expected)
    for least in range(positions):
        seq = Placed(slot=1, pages=(20, 21, 22, 23, 24, 25), params=params)
        got = several(step(runner, [seq.chunk(PROMPT)], [seq])[0])
        right = least
        while len(got) + right + 1 <= len(expected):
            drafts = drafts_of(tokens, len(got) - 1, positions - 1, right)
            row = several(step(runner, [seq.verify(START + len(got) - 1, drafts)])[0])
            got += row
            assert len(row) == right + 1
            for one, other in zip(got, expected, strict=False):
                assert_same(one, other)
            pairs = zip(state_of(runner, seq.slot), states[len(got) - 1], strict=True)
            for found, wanted in pairs:
                np.testing.assert_array_equal(found, wanted)
            right = (right + 3) % positions


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_the_state_has_the_bits_of_plain_decoding(runner: Runner, params: SamplingParams) -> None:
    assert_bits_of_plain_decoding(runner, params, positions=8)


def test_rows_that_compute_nothing_leave_their_state_alone(runner: Runner) -> None:
    """Padding, and a row behind its end."""
    tokens = tokens_of(generate(runner, Placed(), PROMPT, 5))
    first, other = Placed(slot=1, pages=(20, 21, 22, 23)), Placed(slot=2, pages=(24, 25, 26, 27))
    step(runner, [first.chunk(PROMPT), other.chunk(PROMPT)], [first, other])
    before = [state_of(runner, slot) for slot in (0, 2, 3)]
    drafts = drafts_of(tokens, 0, 3, 3)
    rows = [first.verify(START, drafts), other.verify(START, drafts, end=START)]
    assert [len(several(each)) for each in step(runner, rows) if each] == [4]
    for slot, kept in zip((0, 2, 3), before, strict=True):
        for found, wanted in zip(state_of(runner, slot), kept, strict=True):
            np.testing.assert_array_equal(found, wanted)


@st.composite
def drafted(draw: st.DrawFn, config: RunnerConfig) -> tuple[Workload, str, int]:
    """Slots and blocks as the runner has them: snapshots lie behind the slots."""
    work = draw(workloads())
    seqs = config.scheduler.max_num_seqs
    pages = work.cache.num_pages + draw(st.sampled_from([0, 6, 16]))
    tokens = max(work.config.max_num_batched_tokens, seqs - 1 + config.cache.state_block)
    work = Workload(
        replace(work.config, max_num_seqs=seqs, max_num_batched_tokens=tokens),
        replace(config.cache, num_pages=pages),
        work.arrivals[: draw(st.sampled_from([4, 4, 8]))],
        work.ahead,
    )
    return work, draw(st.sampled_from(KINDS)), draw(st.integers(0, 99))


def compare(
    config: RunnerConfig,
    runner: Runner,
    examples: int,
    buckets: tuple[tuple[int, int], ...],
    tolerance: float = TOLERANCE,
) -> None:
    """With prefix hits, which begin with snapshots, with preemption and with rows in flight."""
    solo, occurred = Solo(runner, config), set[int]()
    counts = dict.fromkeys(("accepted", "ahead", "hits", "preemptions"), 0)

    @settings(derandomize=True, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=drafted(config))
    def check(case: tuple[Workload, str, int]) -> None:
        work, kind, seed = case
        outputs = {
            request.id: [event.token for event in solo(request.prompt, request.params)]
            for request, _, _ in work.arrivals
        }

        def output(seq: Sequence) -> list[int]:
            return [token for token in outputs[seq.request_id] if token is not None]

        guesses = Guesses(output, kind=kind, vocab=config.sampled_vocab, seed=seed)
        asked = Verification(proposer=guesses, buckets=buckets)
        loop = check_against_solo(work, runner, solo, tolerance, asked)
        occurred.update(loop.accepted_of_rows)
        counts["accepted"] += loop.accepted
        counts["ahead"] += loop.rows_ahead
        counts["hits"] += loop.hit_tokens
        counts["preemptions"] += loop.scheduler.num_preemptions

    check()
    assert occurred >= set(range(4)), occurred
    assert min(counts.values()) > 2, counts


def test_each_request_gets_the_tokens_it_would_get_alone(
    config: RunnerConfig, runner: Runner
) -> None:
    compare(config, runner, 300, BUCKETS)


@pytest.mark.gpu
def test_each_request_gets_the_tokens_it_would_get_alone_on_a_gpu() -> None:
    """In float32, with heads and blocks that the kernels take."""
    own = replace(DELTA_NET, key_dim=16, value_dim=16, block=16)
    spec = hybrid(replace(RECURRENT, delta_net=own), replace(RECURRENT, delta_net=own), FULL)
    made = make_config(spec=spec, decode=(1, 4), prefill=(24,), verify=BUCKETS, max_model_len=24)
    cache = replace(made.cache, snapshots=3, snapshot_stride=16, state_block=16)
    config = replace(made, cache=cache)
    with whole_float32():
        runner = make_runner(config)
    before = COMPILES.count
    compare(config, runner, 60, BUCKETS, tolerance=1e-3)
    assert COMPILES.count == before, "something was compiled while serving"
