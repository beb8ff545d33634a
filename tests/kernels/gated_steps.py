"""Steps of single tokens through attention with gates and RoPE on a part of each head."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.gated_attention import PrologueHeads, gated_attention
from jaxserve_kernels.kv_format import AttentionStep, named
from jaxserve_kernels.target import Target
from tests.kernels.kv_steps import EPS, LAYER, Sequences

ONE = (1100,)
FEW = (0, 31, 32, 64, 130)
MANY = tuple(range(0, 400, 20))


class Case(NamedTuple):
    """Heads, and the positions of a step's tokens."""

    head_dim: int
    rotated: int
    q_heads: int
    gated: bool
    norms: str | None
    """The dtype of their weights."""
    starts: tuple[int, ...]
    window: int | None = None


CASES = (
    *(Case(256, 64, 12, True, "float32", starts) for starts in (ONE, FEW, MANY)),  # Qwen3.5 27B
    Case(256, 64, 16, True, "float32", FEW),  # 35B-A3B
    Case(256, 64, 12, True, "float32", FEW, window=50),
    Case(256, 128, 4, True, "bfloat16", FEW),
    Case(128, 32, 8, False, "float32", FEW),
    Case(64, 64, 8, True, None, ONE),
)


class Inputs(NamedTuple):
    """The arrays of `attended`."""

    projected: jax.Array
    kv: jax.Array
    weights: HeadWeights
    tables: tuple[jax.Array, jax.Array]
    step: AttentionStep


def inputs_of(case: Case) -> Inputs:
    """Random inputs of a case, with a cache that is full of numbers."""
    starts, head_dim = case.starts, case.head_dim
    sequences = Sequences(
        lengths=tuple(start + 1 for start in starts), page_size=64, dtype="bfloat16",
        q_heads=case.q_heads, kv_heads=2, head_dim=head_dim,
    )  # fmt: skip
    step = jax.tree.map(jnp.asarray, sequences.step(starts, (1,) * len(starts), 1))
    tokens, rng = step.slots.shape[0], np.random.default_rng(head_dim)

    def normal(*shape: int, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    weights = HeadWeights()
    if case.norms is not None:
        weights = HeadWeights(*(1 + normal(head_dim, dtype=case.norms) / 8 for _ in range(2)))
    angles = rng.uniform(0, 6, (tokens, case.rotated // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    heads = _heads(case)
    projected = normal(4, tokens, heads.q_size * (1 + case.gated) + 2 * heads.kv_size)
    cache = named("auto").allocate(sequences.shape, "bfloat16")
    return Inputs(projected, normal(*cache.shape, dtype="bfloat16"), weights, tables, step)


def attended(case: Case, projected: Any, kv: Any, *rest: Any, target: Target) -> Any:
    """`gated_attention` of `Inputs`."""
    return gated_attention(
        projected, kv, LAYER, *rest,
        heads=_heads(case), eps=EPS, tile_size=1, dtype="bfloat16", window=case.window,
        target=target,
    )  # fmt: skip


def _heads(case: Case) -> PrologueHeads:
    return PrologueHeads(case.q_heads, 2, case.head_dim, case.gated)
