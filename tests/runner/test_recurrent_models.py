"""A model with delta nets: each request gets the tokens that it would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from jaxserve.layer_spec import AttentionSpec, DeltaNetSpec, FeedForwardSpec, LayerSpec, Rope
from jaxserve.model_spec import ModelSpec
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format import named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, workloads
from tests.tiny_model import COMPILES, make_config, make_runner

SNAPSHOTS, BLOCK = 3, 4
STATE: dict[str, Any] = {"snapshots": SNAPSHOTS, "snapshot_stride": 8, "state_block": BLOCK}
FEED_FORWARD = FeedForwardSpec(width=48)
RECURRENT = LayerSpec(
    delta_net=DeltaNetSpec(
        key_heads=2, value_heads=4, key_dim=8, value_dim=12, conv_width=4, block=BLOCK
    ),
    feed_forward=FEED_FORWARD,
)
FULL = LayerSpec(
    attention=AttentionSpec(
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        rope=Rope(theta=10_000.0, fraction=0.25),
        qk_norm=True,
        gated=True,
    ),
    feed_forward=FEED_FORWARD,
)


def hybrid(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3_5ForCausalLM",
        vocab_size=97,
        embed=32,
        layers=layers,
        max_position=256,
        tie_embeddings=True,
        zero_centred_norms=True,
    )


SPECS = {
    "attention last": hybrid(RECURRENT, RECURRENT, FULL),
    "delta net last": hybrid(FULL, RECURRENT),
}


KVARN = KVarN(value_bits=4, group=4)
VARIANTS = (
    *(pytest.param((name, named("auto")), id=name) for name in SPECS),
    pytest.param(("attention last", KVARN), id="kvarn", marks=pytest.mark.slow),
    pytest.param(("attention last", named("fp8_e4m3")), id="fp8", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=VARIANTS)
def config(request: pytest.FixtureRequest) -> RunnerConfig:
    spec, kv_format = request.param
    made = make_config(spec=SPECS[spec], decode=(4,), prefill=(24,), max_model_len=24)
    cache = replace(made.cache, own_tokens=kv_format.own_tokens, **STATE)
    return replace(made, cache=cache, kv_format=kv_format)


@pytest.fixture(scope="module")
def runner(config: RunnerConfig) -> Iterator[Runner]:
    compiled = make_runner(config)
    before = COMPILES.count
    yield compiled
    assert COMPILES.count == before, "something was compiled while serving"


def test_each_request_gets_the_tokens_it_would_get_alone(
    config: RunnerConfig, runner: Runner
) -> None:
    solo = Solo(runner, config)
    preemptions: list[int] = []
    hits: list[int] = []

    @settings(derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))
    @given(work=workloads())
    def check(work: Workload) -> None:
        seqs = config.scheduler.max_num_seqs  # snapshots lie behind the slots
        tokens = max(work.config.max_num_batched_tokens, seqs - 1 + BLOCK)
        work = work._replace(
            config=replace(work.config, max_num_seqs=seqs, max_num_batched_tokens=tokens),
            cache=replace(config.cache, num_pages=work.cache.num_pages),
        )
        loop = check_against_solo(work, runner, solo)
        preemptions.append(loop.scheduler.num_preemptions)
        hits.append(loop.hit_tokens)

    check()
    assert sum(preemptions) > 5 and sum(hits) > 30
