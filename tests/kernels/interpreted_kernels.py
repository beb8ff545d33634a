"""Run by tests/aot/test_interpreted_kernels.py, in a process in which Triton interprets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import target
from jaxserve_kernels.add_rms_norm import reference as add_rms_norm_reference
from jaxserve_kernels.add_rms_norm import triton as add_rms_norm_triton
from jaxserve_kernels.attention_inputs import KVSlots, attention_inputs
from jaxserve_kernels.attention_inputs import triton as attention_inputs_triton
from jaxserve_kernels.dense_matmul import reference as products_reference
from jaxserve_kernels.dense_matmul import triton as products_triton
from jaxserve_kernels.dense_matmul.config import Config
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention
from jaxserve_kernels.paged_attention import triton as paged_attention_triton
from jaxserve_kernels.paged_attention.config import Config as AttentionConfig
from jaxserve_kernels.paged_attention.specs import SMALL_SPECS, make_inputs

SPECS = {spec.name: spec for spec in SMALL_SPECS}


def relative_error(out: object, expected: object) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_products(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, 256)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((128, 256)) / 16, jnp.float32)
    parts = products_triton.linear(x, weight, Config(rows=32, depth=64, splits=2))
    assert relative_error(parts.sum(0), products_reference.linear(x, weight, x.dtype)[0]) < 1e-6
    gated = products_triton.gated_linear(x, weight, Config(rows=32, depth=64))
    assert relative_error(gated, products_reference.gated_linear(x, weight)) < 1e-6


@pytest.mark.parametrize("parts", [1, 3])
def test_residual_and_norm(parts: int) -> None:
    rng = np.random.default_rng(parts)
    x, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 96), (96,)))
    update = jnp.asarray(rng.standard_normal((parts, 5, 96)), jnp.float32)
    outputs = add_rms_norm_triton.add_rms_norm(x, update, weight, 1e-6)
    expected = add_rms_norm_reference.add_rms_norm(x, update, weight, 1e-6)
    for output, wanted in zip(outputs, expected, strict=True):
        assert relative_error(output, wanted) < 1e-6


@pytest.mark.parametrize("parts", [1, 3])
def test_attention_inputs(parts: int) -> None:
    rng = np.random.default_rng(parts)
    tokens, pages, q_heads, kv_heads, dim, page = 5, 4, 4, 2, 32, 4
    qkv = jnp.asarray(
        rng.standard_normal((parts, tokens, (q_heads + 2 * kv_heads) * dim)), jnp.float32
    )
    kv = jnp.asarray(rng.standard_normal((2, pages, kv_heads, 2, page, dim)), jnp.float32)
    norms = tuple(jnp.asarray(rng.standard_normal(dim), jnp.float32) for _ in range(2))
    angles = rng.uniform(0, 100, (tokens, dim // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    places = rng.choice(pages * page, tokens, replace=False).astype(np.int32)
    slots = KVSlots(jnp.asarray(places // page), jnp.asarray(places % page))
    outputs = attention_inputs_triton.attention_inputs(qkv, kv, 1, norms, tables, slots, eps=1e-6)
    with target.use(target.Target("reference")):
        expected = attention_inputs(qkv, kv, 1, norms, tables, slots, eps=1e-6)
    for output, wanted in zip(outputs, expected, strict=True):
        assert relative_error(output, wanted) < 1e-6


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("decode_at_page_edges", 1),
        ("decode_at_page_edges", 4),
        ("decode_padded", 2),
        ("decode_with_one_head", 2),
        ("prefill_in_tiles_of_one", 2),
    ],
)
def test_paged_attention(name: str, splits: int) -> None:
    spec = SPECS[name]
    inputs = make_inputs(spec, seed=3)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)
    used = np.zeros(spec.num_tokens, bool)
    for first, length in zip(inputs.first, inputs.length, strict=True):
        used[first : first + length] = True

    def reference(q: jax.Array, kv: jax.Array) -> jax.Array:
        return paged_attention(
            q, kv, inputs.layer, inputs.page_table, tiles, tile_size=spec.tile_size
        )

    with target.use(target.Target("reference")):
        expected = jax.jit(reference)(inputs.q, inputs.kv)
    out = paged_attention_triton.paged_attention(
        jnp.asarray(inputs.q), jnp.asarray(inputs.kv), inputs.layer,
        jnp.asarray(inputs.page_table), QueryTiles(*map(jnp.asarray, tiles)),
        tile_size=spec.tile_size, config=AttentionConfig(splits=splits, num_warps=4, num_stages=3),
    )  # fmt: skip
    assert relative_error(out[used], expected[used]) < 1e-6
