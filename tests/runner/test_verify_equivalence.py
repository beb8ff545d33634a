"""With drafts of any kind each request gets the tokens that it would get alone without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.model_spec import ModelSpec
from jaxserve.runner import kv_cache
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import Verification
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.driver import CONFIG, TOLERANCE, short
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, play, workloads
from tests.runner.test_kv_formats import MOST_DIFFERENT
from tests.runner.test_windows import SPECS
from tests.scheduler.loop import Loop
from tests.scheduler.proposers import KINDS, Guesses
from tests.tiny_model import COMPILES, SPEC, make_config, make_runner

BUCKETS = ((4, 4), (1, 8))
MODELS = {
    "alternating windows": (SPECS["alternating"], named("auto")),
    "int8": (SPEC, named("int8")),
    "fp8_e4m3": (SPEC, named("fp8_e4m3")),
    "kvarn": (SPEC, KVarN(value_bits=2, group=4)),
}


class Served(NamedTuple):
    config: RunnerConfig
    runner: Runner
    solo: Solo


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "auto":
        config, runner = short(CONFIG), request.getfixturevalue("verifying")
    else:
        config, runner = compiled(*MODELS[request.param])
    before = COMPILES.count
    yield Served(config, runner, Solo(runner, config))
    assert COMPILES.count == before, "something was compiled while serving"


def compiled(spec: ModelSpec, kv_format: KVFormat) -> tuple[RunnerConfig, Runner]:
    config = make_config(
        spec=spec, decode=(4,), prefill=(24,), verify=BUCKETS, max_model_len=24, num_pages=61
    )
    config = replace(config, kv_format=kv_format)
    return config, make_runner(config)


class Drafted(NamedTuple):
    work: Workload
    kind: str
    seed: int


@st.composite
def drafted(draw: st.DrawFn, config: RunnerConfig) -> Drafted:
    """As many requests as slots, mostly: what waits leaves no room for drafts."""
    work = draw(workloads())
    most = draw(st.sampled_from([work.config.max_num_seqs] * 3 + [8]))
    pages = work.cache.num_pages + draw(st.sampled_from([0, 6, 16]))
    cache = kv_cache.cache_config(
        config.spec, [pages] * config.num_groups, 4, config.kv_format.own_tokens
    )
    limits = replace(work.config, max_num_batched_tokens=24)
    work = Workload(limits, cache, work.arrivals[:most], work.ahead)
    return Drafted(work, draw(st.sampled_from(KINDS)), draw(st.integers(0, 99)))


def verification(served: Served, case: Drafted) -> Verification:
    """Asks what each request yields alone before it uses the device for all of them."""
    outputs = {
        request.id: [event.token for event in served.solo(request.prompt, request.params)]
        for request, _, _ in case.work.arrivals
    }

    def output(seq: Sequence) -> list[int]:
        return [token for token in outputs[seq.request_id] if token is not None]

    vocab = served.config.sampled_vocab
    guesses = Guesses(output, kind=case.kind, vocab=vocab, seed=case.seed)
    return Verification(proposer=guesses, buckets=BUCKETS)


class Compared(NamedTuple):
    unequal: int
    """Requests whose tokens are not those that they get alone."""
    requests: int
    loop: Loop


def different(served: Served, case: Drafted, *, exact: bool) -> Compared:
    """Plays a workload with drafts. With `exact` all is compared."""
    work, guesses = case.work, verification(served, case)
    if exact:
        loop = check_against_solo(work, served.runner, served.solo, TOLERANCE, guesses)
        return Compared(0, len(work.arrivals), loop)
    loop = play(work, served.runner, guesses)
    unequal = 0
    for request, _, abort_delay in work.arrivals:
        over = loop.finish(request.id) is not None
        assert over or abort_delay is not None
        got = loop.tokens(request.id)
        expected = [event.token for event in served.solo(request.prompt, request.params)]
        unequal += got != (expected if over else expected[: len(got)])
    return Compared(unequal, len(work.arrivals), loop)


def compare(served: Served, examples: int) -> None:
    exact = not served.config.kv_format.quantized
    found: list[Compared] = []

    @settings(derandomize=True, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=drafted(served.config))
    def check(case: Drafted) -> None:
        found.append(different(served, case, exact=exact))

    check()
    unequal, requests = sum(each.unequal for each in found), sum(each.requests for each in found)
    assert sum(each.loop.accepted for each in found) > requests
    assert sum(each.loop.rows_ahead for each in found) > requests // 2
    occurred = set[int]().union(*(each.loop.accepted_of_rows for each in found))
    assert occurred >= set(range(4)), "test_verify has every number of accepted drafts"
    assert unequal <= MOST_DIFFERENT * requests, (unequal, requests)


models = partial(pytest.mark.parametrize, "served", indirect=True)


@models(["auto"])
def test_with_drafts_each_request_gets_the_tokens_it_would_get_alone(served: Served) -> None:
    compare(served, examples=40)


@pytest.mark.slow
@models(["auto", *MODELS])
def test_with_drafts_each_request_gets_its_tokens_in_many_workloads(served: Served) -> None:
    compare(served, examples=1000)
