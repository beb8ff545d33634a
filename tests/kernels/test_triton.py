"""The Triton kernels against the plain-JAX references, on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import target
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.attention_inputs import KVSlots, attention_inputs
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention
from jaxserve_kernels.paged_attention.specs import (
    MODEL_SPECS,
    SMALL_SPECS,
    AttentionSpec,
    make_inputs,
)

pytestmark = pytest.mark.gpu


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


TOLERANCE = {"bfloat16": 6e-3, "float32": 2e-6}
"""Relative to the norm; the bf16 result is rounded to 8 bits, which alone costs 2e-3."""


@pytest.mark.parametrize("spec", SMALL_SPECS + MODEL_SPECS, ids=lambda spec: spec.name)
def test_paged_attention_equals_its_reference(spec: AttentionSpec) -> None:
    inputs = make_inputs(spec, seed=7)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)

    def attend(implementation: target.Implementation, dtype: jnp.dtype) -> jax.Array:
        call = functools.partial(paged_attention, layer=inputs.layer, tile_size=spec.tile_size)
        with target.use(target.Target(implementation)):
            return jax.jit(lambda q, kv, table, t: call(q, kv, page_table=table, tiles=t))(
                jnp.asarray(inputs.q, dtype),
                jnp.asarray(inputs.kv, dtype),
                inputs.page_table,
                tiles,
            )

    used = np.zeros(spec.num_tokens, bool)
    for first, length in zip(inputs.first, inputs.length, strict=True):
        used[first : first + length] = True
    with jax.default_matmul_precision("highest"):
        expected = attend("reference", jnp.float32)
    out = attend("triton", jnp.dtype(spec.dtype))
    assert relative_error(out[used], expected[used]) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "embed"), [(1, 256), (3, 2560), (64, 2560), (17, 5120)])
def test_add_rms_norm_equals_its_reference(tokens: int, embed: int, dtype: str) -> None:
    keys = jax.random.split(jax.random.key(3), 3)
    x, update = (jax.random.normal(key, (tokens, embed)).astype(dtype) for key in keys[:2])
    weight = (1 + 0.1 * jax.random.normal(keys[2], (embed,))).astype(dtype)

    def run(implementation: target.Implementation) -> tuple[jax.Array, jax.Array]:
        with target.use(target.Target(implementation)):
            return jax.jit(lambda *arrays: add_rms_norm(*arrays, 1e-6))(x, update, weight)

    for out, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "page"),
    [(32, 8, 128, 64), (4, 2, 64, 16), (40, 8, 128, 64), (1, 1, 32, 4)],
)
def test_attention_inputs_equal_their_reference(
    q_heads: int, kv_heads: int, dim: int, page: int, dtype: str
) -> None:
    rng = np.random.default_rng(5)
    tokens, pages = 9, 5
    qkv = jnp.asarray(rng.standard_normal((tokens, (q_heads + 2 * kv_heads) * dim)), dtype)
    kv = jnp.asarray(rng.standard_normal((3, pages, kv_heads, 2, page, dim)), dtype)
    norms = tuple(jnp.asarray(1 + 0.1 * rng.standard_normal(dim), dtype) for _ in range(2))
    angles = rng.uniform(0, 100, (tokens, dim // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    places = rng.choice(pages * page, tokens, replace=False)
    slots = KVSlots(jnp.asarray(places // page, jnp.int32), jnp.asarray(places % page, jnp.int32))

    def run(implementation: target.Implementation) -> tuple[jax.Array, jax.Array]:
        with target.use(target.Target(implementation)):
            return jax.jit(
                lambda qkv, kv: attention_inputs(qkv, kv, 1, norms, tables, slots, eps=1e-6)
            )(qkv, kv)

    for out, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(out, expected) < TOLERANCE[dtype]
