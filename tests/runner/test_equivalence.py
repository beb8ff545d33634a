"""Scheduler and device together: each request gets the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from jaxserve.api import FinishReason, Request, SamplingParams, TokenEvent
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.verify import Verification
from tests.runner.driver import TOLERANCE
from tests.scheduler.loop import Loop
from tests.tiny_model import COMPILES, SPEC, make_config

CONFIG = make_config(decode=(1, 4), prefill=(4, 24), max_model_len=24)
LAST_ARRIVAL = 10

PROMPTS: tuple[tuple[int, ...], ...] = (
    (3,),
    (3, 14, 15, 9),
    (3, 14, 15, 9, 26),
    (53, 58, 9, 79, 32, 38, 46, 26),
    *(tuple(range(10, 10 + length)) for length in (5, 8, 9, 12, 13)),
    tuple(range(80, 69, -1)),
    tuple(range(10, 27)),
)
SAMPLING = (
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.0, logprobs=5),
    SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_tokens=12, temperature=2.0, seed=2, top_k=20, logprobs=20),
    SamplingParams(max_tokens=12, temperature=0.7, seed=3, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=7, temperature=1.5, seed=4, stop_token_ids=frozenset(range(12))),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, logprobs=3),
    SamplingParams(max_tokens=12, seed=5, presence_penalty=2.0, frequency_penalty=1.5),
    SamplingParams(
        max_tokens=9,
        seed=6,
        min_tokens=5,
        stop_token_ids=frozenset(range(40)),
        logit_bias=((3, 6.0), (90, -100.0)),
        frequency_penalty=-1.0,
        top_k=30,
    ),
    SamplingParams(max_tokens=9, seed=8, prompt_logprobs=4),
    SamplingParams(max_tokens=9, seed=7, allowed_token_ids=tuple(range(40, 50))),
)


class DeviceLoop(Loop):
    """The loop of the scheduler's tests on a real device."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        runner: Runner,
        verification: Verification | None = None,
    ):
        super().__init__(config, cache, verification=verification)
        runner.reset()
        self.runner = runner


class Arrival(NamedTuple):
    request: Request
    turn: int
    abort_delay: int | None


class Workload(NamedTuple):
    config: SchedulerConfig
    cache: CacheConfig
    arrivals: list[Arrival]
    ahead: int


@pytest.fixture(scope="module")
def runner(compiled: Runner) -> Iterator[Runner]:
    before = COMPILES.count
    yield compiled
    assert COMPILES.count == before, "something was compiled while serving"


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """The compiled shapes bound the limits of every workload; pools are scarce."""
    max_num_seqs = draw(st.integers(1, 4))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=24,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
    )
    cache = CacheConfig(num_pages=1 + draw(st.integers(6, 12)), page_size=4)
    arrivals = [
        Arrival(
            request=Request(
                id=f"r{number}",
                prompt=draw(st.sampled_from(PROMPTS)),
                params=draw(st.sampled_from(SAMPLING)),
            ),
            turn=draw(st.integers(0, LAST_ARRIVAL)),
            abort_delay=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
        )
        for number in range(draw(st.sampled_from([4, 8, 6, 2, 1])))
    ]
    return Workload(config, cache, arrivals, draw(st.sampled_from([1, 1, 0])))


def play(work: Workload, runner: Runner, verification: Verification | None = None) -> Loop:
    loop = DeviceLoop(work.config, work.cache, runner, verification)
    for turn in range(500):
        for arrival in work.arrivals:
            if arrival.turn == turn:
                loop.add(arrival.request)
            if arrival.abort_delay is not None and turn == arrival.turn + arrival.abort_delay:
                loop.abort(arrival.request.id)
        if not loop.turn(work.ahead) and turn > LAST_ARRIVAL:
            return loop
    raise AssertionError("no progress")


def check_against_solo(
    work: Workload,
    runner: Runner,
    solo: Solo,
    tolerance: float = TOLERANCE,
    verification: Verification | None = None,
) -> Loop:
    loop = play(work, runner, verification)
    aborted = {arrival.request.id for arrival in work.arrivals if arrival.abort_delay is not None}
    for arrival in work.arrivals:
        request = arrival.request
        got, expected = loop.events[request.id], solo(request.prompt, request.params)
        over = bool(got) and got[-1].finish is not None
        assert over or request.id in aborted
        for event_, expected_event in zip(got, expected[: len(got)], strict=True):
            _assert_same(event_, expected_event, tolerance)
        assert len(got) == len(expected) or not over
    for pool, group in zip(loop.scheduler.pools, work.cache.groups, strict=True):
        assert pool.num_free == group.usable_pages
    assert loop.scheduler.num_running == loop.scheduler.num_waiting == 0
    return loop


def _assert_same(got: TokenEvent, expected: TokenEvent, tolerance: float) -> None:
    assert (got.token, got.finish) == (expected.token, expected.finish)
    assert (got.logprobs is None) == (expected.logprobs is None)
    assert (got.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for one, other in zip(got.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=tolerance)
    if got.logprobs is not None and expected.logprobs is not None:
        assert got.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=tolerance)
        values = [value for _, value in expected.logprobs.top]
        assert [v for _, v in got.logprobs.top] == pytest.approx(values, abs=tolerance)


class Solo:
    """What a request gets alone: the whole prompt at once, every token read before the next."""

    def __init__(self, runner: Runner, config: RunnerConfig = CONFIG):
        self._runner, self._config = runner, config
        self._events = cache(self._run)

    def __call__(self, prompt: tuple[int, ...], params: SamplingParams) -> list[TokenEvent]:
        return self._events(prompt, params)

    def _run(self, prompt: tuple[int, ...], params: SamplingParams) -> list[TokenEvent]:
        loop = DeviceLoop(self._config.scheduler, self._config.cache, self._runner)
        loop.add(Request(id="alone", prompt=prompt, params=params))
        loop.run(ahead=0)
        return loop.events["alone"]


@pytest.fixture(scope="module")
def solo(runner: Runner) -> Solo:
    return Solo(runner)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)
@given(work=workloads())
def test_each_request_gets_the_tokens_it_would_get_alone(
    work: Workload, runner: Runner, solo: Solo
) -> None:
    loop = check_against_solo(work, runner, solo)
    event(f"preemptions: {min(loop.scheduler.num_preemptions, 3)}")
    event(f"wasted rows: {min(loop.wasted_rows, 3)}")


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(work=workloads())
def test_each_request_gets_the_tokens_it_would_get_alone_in_many_workloads(
    work: Workload, runner: Runner, solo: Solo
) -> None:
    check_against_solo(work, runner, solo)


@pytest.mark.parametrize("params", SAMPLING[2:5], ids=["plain", "top_k", "top_p"])
def test_preempted_sequences_sample_what_they_would_have_sampled(
    runner: Runner, solo: Solo, params: SamplingParams
) -> None:
    arrivals = [
        Arrival(Request(id=f"r{i}", prompt=prompt, params=params), turn=0, abort_delay=None)
        for i, prompt in enumerate(PROMPTS[1:5])
    ]
    work = Workload(CONFIG.scheduler, CacheConfig(num_pages=9, page_size=4), arrivals, ahead=1)
    loop = check_against_solo(work, runner, solo)
    assert loop.scheduler.num_preemptions > 0


def test_requests_differ_enough_for_the_comparison_to_mean_something(solo: Solo) -> None:
    outputs = {
        tuple(event.token for event in solo(prompt, params))
        for prompt in PROMPTS
        for params in SAMPLING[:5]
    }
    assert len(outputs) >= 22  # greedy twice, and the longest prompt leaves room for 7 tokens
    tokens = {token for output in outputs for token in output}
    assert len(tokens) > SPEC.vocab_size // 2
    reasons = {solo(prompt, params)[-1].finish for prompt in PROMPTS for params in SAMPLING}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
