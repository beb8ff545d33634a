"""Layers with windows: each request gets the tokens that it would get alone, in scarce pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.model_spec import ModelSpec
from jaxserve.runner import kv_cache
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, play, workloads
from tests.tiny_model import COMPILES, make_config, make_runner, tiny_spec

MOST_DIFFERENT = 0.01
"""Share of requests whose tokens may differ with a rounded format, see test_kv_formats."""


def with_windows(*windows: int | None) -> ModelSpec:
    """A model with one layer for each window."""
    spec = tiny_spec(num_layers=len(windows))
    layers = (
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(spec.layers, windows, strict=True)
    )
    return replace(spec, layers=tuple(layers))


SPECS = {"window": with_windows(6, 6), "alternating": with_windows(7, None, 7)}


class Served(NamedTuple):
    config: RunnerConfig
    runner: Runner


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, kv_format = request.param
    spec = SPECS[name]
    config = make_config(spec=spec, decode=(4,), prefill=(24,), max_model_len=24)
    config = replace(config, kv_format=kv_format)
    compiled = make_runner(config)
    before = COMPILES.count
    yield Served(config, compiled)
    assert COMPILES.count == before, "something was compiled while serving"


@st.composite
def windowed_workloads(draw: st.DrawFn, config: RunnerConfig) -> Workload:
    """Pools of the groups are scarce, down to what a single sequence needs."""
    work = draw(workloads())
    pages = [
        1 + draw(st.integers(6, 12) if group.window is None else st.integers(3, 7))
        for group in config.spec.cache_groups
    ]
    own = config.kv_format.own_tokens
    return work._replace(cache=kv_cache.cache_config(config.spec, pages, 4, own))


def cases(*formats: KVFormat, specs: Iterable[str] = SPECS) -> pytest.MarkDecorator:
    params = [(name, each) for name in specs for each in formats]
    ids = [f"{name}-{each.name}" for name, each in params]
    return pytest.mark.parametrize("served", params, indirect=True, ids=ids)


@cases(named("auto"))
def test_each_request_gets_the_tokens_it_would_get_alone(served: Served) -> None:
    solo = Solo(served.runner, served.config)
    preemptions: list[int] = []
    hits: list[int] = []

    @settings(derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck))
    @given(work=windowed_workloads(served.config))
    def check(work: Workload) -> None:
        loop = check_against_solo(work, served.runner, solo)
        preemptions.append(loop.scheduler.num_preemptions)
        hits.append(loop.hit_tokens)

    check()
    assert sum(preemptions) and sum(hits)


@pytest.mark.slow
@cases(named("int8"), KVarN(value_bits=2, group=4), specs=["alternating"])
def test_rounded_formats_have_windows_too(served: Served) -> None:
    solo = Solo(served.runner, served.config)
    different = requests = 0

    @settings(derandomize=True, max_examples=10, suppress_health_check=list(HealthCheck))
    @given(work=windowed_workloads(served.config))
    def check(work: Workload) -> None:
        nonlocal different, requests
        loop = play(work, served.runner)
        for request, *_ in work.arrivals:
            got = loop.tokens(request.id)
            expected = [event.token for event in solo(request.prompt, request.params)]
            complete = expected if loop.finish(request.id) is not None else expected[: len(got)]
            different += got != complete
            requests += 1

    check()
    assert different <= MOST_DIFFERENT * requests, (different, requests)


@cases(named("auto"))
def test_a_window_hides_what_is_behind_it(served: Served) -> None:
    """The last token of a long prompt depends on its last tokens alone, if all layers have the
    window; on those before, if one has none."""
    from tests.runner.driver import Placed, first_token

    alone = Placed(groups=served.config.num_groups)
    first, second = (
        first_token(served.runner, alone, (start, *range(10, 32))).logprobs for start in (3, 50)
    )
    reach = served.config.spec.num_layers * 6
    sees_all = any(group.window is None for group in served.config.spec.cache_groups)
    assert reach < 22 and (first != second) == sees_all
