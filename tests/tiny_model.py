"""A random two-layer float32 model, and runners of it that compile in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxserve.config import Buckets, CacheConfig, SchedulerConfig
from jaxserve.model_spec import ModelSpec
from jaxserve.models import qwen3
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner, on_compile
from jaxserve_checkpoints.dummy import dummy_params

SPEC = ModelSpec(
    vocab_size=97,
    embed=32,
    ffn=48,
    num_layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    max_position=256,
)


@dataclass
class StubMetrics:
    """Keeps what it is told."""

    steps: list[dict[str, Any]] = field(default_factory=list)

    def observe_step(self, **step: Any) -> None:
        self.steps.append(step)


class CompileCounter:
    """XLA compilations of this process so far."""

    def __init__(self) -> None:
        self.count = 0
        on_compile(self._compiled)

    def _compiled(self) -> None:
        self.count += 1


COMPILES = CompileCounter()


def make_params(spec: ModelSpec = SPEC, seed: int = 0) -> qwen3.Params:
    return dummy_params(qwen3.abstract(spec, jnp.float32), seed)


def make_config(
    *,
    spec: ModelSpec = SPEC,
    max_num_seqs: int = 4,
    max_model_len: int = 32,
    num_pages: int = 41,
    page_size: int = 4,
    decode: tuple[int, ...] = (1, 4),
    prefill: tuple[int, ...] = (8, 32),
    tile_size: int = 4,
    sampled_vocab: int | None = None,
) -> RunnerConfig:
    return RunnerConfig(
        spec=spec,
        cache=CacheConfig(num_pages=num_pages, page_size=page_size),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=prefill[-1],
        ),
        buckets=Buckets(decode=decode, prefill=prefill),
        dtype=jnp.float32,
        sampled_vocab=sampled_vocab or spec.vocab_size,
        tile_size=tile_size,
    )


def make_runner(
    config: RunnerConfig, params: qwen3.Params | None = None, metrics: StubMetrics | None = None
) -> Runner:
    """Compiled and ready."""
    params = make_params(config.spec) if params is None else params
    sink: Any = metrics or StubMetrics()
    runner = Runner(config, params, sink)
    runner.compile(2, lambda name, done: None)
    return runner
