"""With any KV format each request gets the tokens that it would get alone with that format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from jaxserve.config import Buckets
from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format import AUTO, KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_equivalence import CONFIG, Solo, Workload, play, workloads
from tests.scheduler.loop import Loop
from tests.tiny_model import COMPILES, make_runner

FORMATS: tuple[KVFormat, ...] = (named("int8"), KVarN(value_bits=2, group=4))
MORE_FORMATS: tuple[KVFormat, ...] = (named("fp8_e4m3"), KVarN(value_bits=4, group=4))
"""They share the code of the formats above."""
FEW_BUCKETS = Buckets(decode=CONFIG.buckets.decode[-1:], prefill=CONFIG.buckets.prefill[-1:])
"""A step of each kind: compiling is most of the time that these tests take."""
MOST_DIFFERENT = 0.01
"""Share of requests whose tokens may differ. Shapes move activations by 1e-7, which can round an
element to the next code. None of 319 differed with any format; a tile that is stale, or encoded too
early or late, changes most."""


class Served(NamedTuple):
    runner: Runner
    kv_format: KVFormat


def with_formats(formats: Iterable[KVFormat], buckets: Buckets) -> pytest.MarkDecorator:
    params = [(each, buckets) for each in formats]
    return pytest.mark.parametrize("served", params, indirect=True, ids=lambda it: it[0].name)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    kv_format, buckets = request.param
    if kv_format == AUTO:
        compiled = request.getfixturevalue("compiled")
    else:
        compiled = make_runner(replace(CONFIG, kv_format=kv_format, buckets=buckets))
    before = COMPILES.count
    yield Served(compiled, kv_format)
    assert COMPILES.count == before, "something was compiled while serving"


class Played(NamedTuple):
    """Of all workloads together."""

    different: int
    """Requests whose tokens are not those they get alone."""
    requests: int
    preemptions: int
    hit_tokens: int
    """Of prompts, those that were found in pages that others had computed."""


def count_different(work: Workload, loop: Loop, solo: Solo) -> int:
    """Requests of a workload that was played whose tokens are not those they get alone."""
    different = 0
    for request, _, abort_delay in work.arrivals:
        assert abort_delay is not None or loop.finish(request.id) is not None
        got = [event.token for event in loop.events[request.id]]
        expected = [event.token for event in solo(request.prompt, request.params)]
        # Those that are cut short are compared as far as they came.
        complete = expected if loop.finish(request.id) is not None else expected[: len(got)]
        different += got != complete
    return different


def play_workloads(served: Served, examples: int) -> Played:
    """Random workloads with joins, leaves, aborts, chunks, preemptions and prefix hits in scarce
    pools."""
    runner, solo = served.runner, Solo(served.runner)
    found: list[Played] = []

    @settings(derandomize=True, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(work=workloads())
    def check(work: Workload) -> None:
        own = served.kv_format.own_tokens
        work = work._replace(cache=replace(work.cache, own_tokens=own))
        loop = play(work, runner)
        assert loop.scheduler.pages.num_free == work.cache.usable_pages
        different = count_different(work, loop, solo)
        counts = loop.scheduler.num_preemptions, loop.hit_tokens
        found.append(Played(different, len(work.arrivals), *counts))

    check()
    return Played(*map(sum, zip(*found, strict=True)))


@with_formats(FORMATS, FEW_BUCKETS)
def test_each_request_gets_the_tokens_it_would_get_alone(served: Served) -> None:
    found = play_workloads(served, examples=25)
    assert found.preemptions and found.hit_tokens
    assert found.different <= MOST_DIFFERENT * found.requests, found


@pytest.mark.slow
@with_formats([*FORMATS, *MORE_FORMATS], CONFIG.buckets)
def test_each_request_gets_its_tokens_in_many_workloads(served: Served) -> None:
    found = play_workloads(served, examples=200)
    assert found.preemptions > 30 and found.hit_tokens > 400
    assert found.different <= MOST_DIFFERENT * found.requests, found
