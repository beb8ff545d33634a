"""The kernels of recurrent layers, compiled for each kind of GPU without one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels.gated_delta_rule import Heads, gated_delta_rule
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
from jaxserve_kernels.target import Target

pytest.importorskip("triton", reason="Triton is not installed")

HEADS = Heads(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
"""Of Qwen3.5-27B."""
LAYERS, SLOTS = 48, 65


@pytest.mark.parametrize("tokens", [8, 512])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_the_delta_rule_compiles(capability: int, tokens: int) -> None:
    target = Target.for_gpu(capability)

    def ints(count: int) -> Any:
        return jax.ShapeDtypeStruct((count,), jnp.int32)

    def floats(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    step = RecurrentStep(ints(tokens), ints(tokens), Rows(*(ints(8) for _ in range(4))))
    state = floats(LAYERS, SLOTS, *HEADS[1:])

    def rule(qkv: Any, gates: Any, a_log: Any, dt_bias: Any, state: Any, step: Any) -> Any:
        given = (qkv, gates, a_log, dt_bias, state, 3, step)
        return gated_delta_rule(*given, heads=HEADS, target=target)

    traced = jax.jit(rule, donate_argnums=4).trace(
        floats(tokens, 2 * HEADS.keys + HEADS.values, dtype=jnp.bfloat16),
        floats(tokens, 2 * HEADS.value_heads, dtype=jnp.bfloat16),
        *(floats(HEADS.value_heads) for _ in range(2)),
        state,
        step,
    )
    assert "scan" not in str(traced.jaxpr), "the definition"
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered
