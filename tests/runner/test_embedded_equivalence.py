"""The embedded model, too, gives each request what it would get alone; on a CPU and on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings

from jaxserve.models import decoder, registry
from jaxserve.runner.runner import Runner
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import embedded_model
from tests.runner.test_equivalence import CONFIG, Solo, Workload, check_against_solo, workloads
from tests.tiny_model import COMPILES, make_runner, whole_float32


@pytest.fixture(scope="module")
def trained_runner() -> Iterator[Runner]:
    """The embedded model in the same buckets, pages and lengths, in float32: a GPU would multiply
    in TF32, and round differently in each bucket."""
    folder = embedded_model()
    spec = registry.spec_of(json.loads((folder / "config.json").read_text()))
    abstract = decoder.abstract(spec, jnp.float32)
    params = load_params(open_checkpoint(folder), registry.rules(spec), abstract)
    with whole_float32():
        runner = make_runner(replace(CONFIG, spec=spec, sampled_vocab=spec.vocab_size), params)
    yield runner


@pytest.fixture(scope="module")
def trained_solo(trained_runner: Runner) -> Solo:
    return Solo(trained_runner)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(work=workloads())
def test_each_request_to_the_embedded_model_gets_the_tokens_it_would_get_alone(
    work: Workload, trained_runner: Runner, trained_solo: Solo
) -> None:
    # Logits of eight layers: logprobs move by 3e-5 with the shape of the step, tokens do not.
    check_against_solo(work, trained_runner, trained_solo, tolerance=1e-4)


@pytest.mark.gpu
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=workloads())
def test_each_request_gets_the_tokens_it_would_get_alone_on_a_gpu(
    work: Workload, trained_runner: Runner, trained_solo: Solo
) -> None:
    """About ten thousand steps."""
    before = COMPILES.count
    check_against_solo(work, trained_runner, trained_solo, tolerance=1e-3)
    assert COMPILES.count == before, "something was compiled while serving"


def test_other_threads_multiply_in_whole_float32_too() -> None:
    """Runners trace their programs on threads of their own."""
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def text() -> str:
        return jax.jit(lambda a, b: a @ b).lower(square, square).as_text()

    with ThreadPoolExecutor(1) as pool:
        with whole_float32():
            assert "HIGHEST" in pool.submit(text).result()
        assert "HIGHEST" not in pool.submit(text).result()
