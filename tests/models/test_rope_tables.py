"""The tables of RoPE, in a compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.layer_spec import AttentionSpec
from jaxserve.models.rope import rope_tables
from jaxserve_kernels.attention_inputs.reference import rope


def test_all_heads_of_all_layers_read_the_same_cosines() -> None:
    """Left alone XLA computes them where they are read: 0.1 ms of a layer with 64 decode rows."""
    attention = AttentionSpec(q_heads=4, kv_heads=2, head_dim=64)

    def layers(x: jax.Array, positions: jax.Array) -> jax.Array:
        tables = rope_tables(attention, positions)
        for _ in range(3):
            x = jnp.tanh(rope(x, *tables)).sum(1, keepdims=True) + x
        return x

    compiled = jax.jit(layers).lower(jnp.ones((64, 4, 64)), jnp.arange(64)).compile()
    assert (compiled.as_text() or "").count(" cosine(") == 1
