"""A random two-layer float32 model, and runners of it that compile in seconds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import Buckets, SchedulerConfig
from jaxserve.layer_spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, Rope
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.programs.executables import on_compile
from jaxserve.runner import kv_cache
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_checkpoints.dummy import dummy_params


def tiny_spec(
    *,
    vocab_size: int = 97,
    embed: int = 32,
    ffn: int | ExpertsSpec = 48,
    num_layers: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    ffn_bias: bool = False,
    tie_embeddings: bool = True,
    architecture: str = "Qwen3ForCausalLM",
) -> ModelSpec:
    """Qwen3's kind unless said otherwise."""
    attention = AttentionSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(theta=1_000_000.0),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )
    return ModelSpec.dense(
        architecture=architecture,
        vocab_size=vocab_size,
        embed=embed,
        ffn=FeedForwardSpec(width=ffn, bias=ffn_bias) if isinstance(ffn, int) else ffn,
        num_layers=num_layers,
        attention=attention,
        max_position=256,
        tie_embeddings=tie_embeddings,
    )


SPEC = tiny_spec()


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


@contextmanager
def whole_float32() -> Generator[None]:
    """Products of float32 that are compiled inside are not in TF32, which is a GPU's default.

    For all threads: programs are traced on several, where `jax.default_matmul_precision` of this
    one has no effect.
    """
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def make_params(spec: ModelSpec = SPEC, seed: int = 0) -> decoder.Params:
    return dummy_params(decoder.abstract(spec, jnp.float32), seed)


def make_config(
    *,
    spec: ModelSpec = SPEC,
    max_num_seqs: int = 4,
    max_model_len: int = 32,
    num_pages: int = 41,
    page_size: int = 4,
    decode: tuple[int, ...] = (1, 4),
    prefill: tuple[int, ...] = (8, 32),
    verify: tuple[tuple[int, int], ...] = (),
    tile_size: int = 4,
    sampled_vocab: int | None = None,
) -> RunnerConfig:
    return RunnerConfig(
        spec=spec,
        cache=kv_cache.cache_config(spec, [num_pages] * len(spec.cache_groups), page_size),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=prefill[-1],
        ),
        buckets=Buckets(decode=decode, prefill=prefill, verify=verify),
        dtype=jnp.float32,
        sampled_vocab=sampled_vocab or spec.vocab_size,
        tile_size=tile_size,
    )


def make_runner(
    config: RunnerConfig, params: decoder.Params | None = None, metrics: StubMetrics | None = None
) -> Runner:
    """Compiled and ready."""
    params = make_params(config.spec) if params is None else params
    sink: Any = metrics or StubMetrics()
    runner = Runner(config, params, sink)
    runner.compile(2, lambda name, done: None)
    return runner
