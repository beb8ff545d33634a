"""Decode steps of hybrid models: all layers are kernels that PDL launches as one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models import decoder
from jaxserve.models.delta_net import abstract_state
from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels.kv_format import AttentionStep, CacheShape, named
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target
from tests.aot.compiled_steps import inspect, missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

SLOTS = 65


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("qwen3.5-27b", 1), ("qwen3.5-27b", 8), ("qwen3.5-27b", 64), ("qwen3.5-35b-a3b", 8)],
)
def test_layers_are_one_chain(model: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three recurrent layers and one of attention, without experts and with a shared one. Every
    kernel compiles."""
    from jaxserve_kernels.pdl import lowering

    found: list[Any] = []

    def trace(*args: Any, **options: Any) -> Any:
        found.append(traced(*args, **options))
        return found[-1]

    traced = lowering.trace
    monkeypatch.setattr(lowering, "trace", trace)
    spec = NAMED_MODELS[model]
    spec = replace(spec, layers=spec.layers[:4])
    own = spec.attention
    shape = CacheShape(
        layers=1, pages=600, kv_heads=own.kv_heads, page_size=64, head_dim=own.head_dim, slots=SLOTS
    )
    caches = (
        named("auto").abstract(shape, jnp.bfloat16),
        abstract_state(spec, jnp.bfloat16, SLOTS),
    )
    params = decoder.abstract(spec, jnp.bfloat16)

    def step(params: Any, caches: Any, each: jax.Array, table: jax.Array) -> Any:
        singles = QueryTiles(each, jnp.ones_like(each), each, each, decode_rows=None)
        places = AttentionStep(
            slots=each, positions=each, pages=each, offsets=each, tiles=singles, page_table=table
        )
        recurrent = RecurrentStep.of_decode(each, each, SLOTS - 1)
        steps = decoder.StepTokens(each, (places,), recurrent)
        return decoder.decode(params, caches, steps, spec, target=Target.for_gpu(90))

    ints = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    table = jax.ShapeDtypeStruct((SLOTS, 512), jnp.int32)
    jax.jit(step).trace(params, caches, ints, table).lower(lowering_platforms=("cuda",))
    assert len(found) == 1 and found[0] is not None, "something is computed outside of kernels"


def test_a_whole_step_is_one_graph() -> None:
    """Decode and prefill, and neither copies the cache or the state."""
    flags = ("--model", "qwen3.5-27b", "--layers", "4", "--decode", "8", "--prefill", "512")
    for name, report in inspect(*flags).items():
        assert report["outside_graph"] == ["kCommandBuffer"], name
        assert report["aliased_bytes"] == report["state_bytes"], name
