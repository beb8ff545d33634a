"""On a GPU, steps of many tokens give the same bits whether or not their kernels are joined to
chains."""

from __future__ import annotations

import dataclasses
from typing import Any

import bench_step
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import encoder

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.plan import Row, Sampled
from jaxserve.runner.runner import Runner
from jaxserve_checkpoints.dummy import dummy_params
from tests.runner.driver import Placed, certain, step
from tests.runner.test_chunks_on_gpu import HYBRID, SPECS, compiled_runner, placed, prompt

pytestmark = pytest.mark.gpu

_EXPERTS = ExpertsSpec(num_experts=16, top_k=4, width=256, normalize=True)


def _sparse(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    layers = tuple(dataclasses.replace(each, feed_forward=experts) for each in spec.layers)
    return dataclasses.replace(spec, layers=layers)


CASES = {
    "bf16": (SPECS[0], None),
    "int4 with a copy": (SPECS[0], "int4"),
    "fp8": (SPECS[0], "fp8"),
    "hybrid fp8": (HYBRID, "fp8"),
    "experts int4": (_sparse(SPECS[0], _EXPERTS), "int4"),
    "hybrid with a shared expert, fp8": (
        _sparse(HYBRID, dataclasses.replace(_EXPERTS, shared_width=256)),
        "fp8",
    ),
}


def make_runner(name: str) -> Runner:
    spec, quantization = CASES[name]
    abstract = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    params = dummy_params(abstract, 0, encoder(spec, quantization, None))
    if name.endswith("a copy"):
        params = bench_step.copied(params)
    return compiled_runner(spec, params, prefill=(512, 2048))


def results(runner: Runner) -> list[Any]:
    """Of prompts in one bucket and the other, of chunks, and of chunks beside decodes."""
    rng = np.random.default_rng(0)
    others = {slot: prompt(rng, length) for slot, length in ((1, 70), (2, 300), (3, 1))}
    rows: list[Row] = [placed(slot).chunk(ids) for slot, ids in others.items()]
    found = [*step(runner, rows, [placed(slot) for slot in others])]
    ids = prompt(rng, 1400)
    for turn, (start, end) in enumerate(((0, 448), (448, 1280), (1280, 1400))):
        decodes = [placed(slot).decode(len(own) + turn) for slot, own in others.items()]
        chunk = placed(5).chunk(ids[start:end], start, samples=end == len(ids))
        admitted: list[Placed] = [placed(5)] if turn == 0 else []
        found += [*step(runner, [*decodes, chunk], admitted)]
    return [_scores(each) for each in found if each is not None]


def _scores(result: Sampled) -> Any:
    own = certain(result)
    assert own.logprobs is not None
    return own.token, dict(own.logprobs.top)


@pytest.mark.parametrize("name", CASES)
def test_joined_steps_compute_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve_kernels.pdl import lowering

    lengths: list[int] = []

    def joined(jaxpr: Any, primitive: Any) -> list[Any]:
        found = join(jaxpr, primitive)
        lengths.append(len(jaxpr.eqns) - len(found))
        return found

    join = lowering.parts.joined
    monkeypatch.setattr(lowering.parts, "joined", joined)
    chains = results(make_runner(name))
    assert lengths and min(lengths) > 0, "no step has a chain"
    monkeypatch.setattr(lowering.parts, "joined", lambda jaxpr, _: list(jaxpr.eqns))
    assert results(make_runner(name)) == chains
    assert len({token for token, _ in chains}) > 1
