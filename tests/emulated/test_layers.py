"""Kernels of layers on the emulator against their references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.add_rms_norm import reference as add_rms_norm_reference
from jaxserve_kernels.add_rms_norm import triton as add_rms_norm_triton
from jaxserve_kernels.attention_inputs import KVSlots, attention_inputs
from jaxserve_kernels.attention_inputs import triton as attention_inputs_triton
from jaxserve_kernels.dense_matmul import reference as products_reference
from jaxserve_kernels.dense_matmul import triton as products_triton
from jaxserve_kernels.dense_matmul.config import Config
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention, triton_decode_rows
from jaxserve_kernels.paged_attention import triton as paged_attention_triton
from jaxserve_kernels.paged_attention.config import Config as AttentionConfig
from jaxserve_kernels.target import REFERENCE
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER
from tests.kernels.attention_inputs import make_inputs
from tests.kernels.attention_specs import SMALL_SPECS, WINDOW_SPECS
from tests.kernels.kv_steps import HEADS, head_weights

SPECS = {spec.name: spec for spec in SMALL_SPECS + WINDOW_SPECS}


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_products(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, 256)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((128, 256)) / 16, jnp.float32)
    parts = products_triton.linear(x, weight, Config(rows=32, depth=64, splits=2), target=HOPPER)
    assert relative_error(parts.sum(0), products_reference.linear(x, weight, x.dtype)[0]) < 1e-6
    gated = products_triton.gated_linear(x, weight, Config(rows=32, depth=64), target=HOPPER)
    assert relative_error(gated, products_reference.gated_linear(x, weight)) < 1e-6


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_residual_and_norm(parts: int, *, biased: bool) -> None:
    rng = np.random.default_rng(parts)
    x, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 96), (96,)))
    update = jnp.asarray(rng.standard_normal((parts, 5, 96)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(96), jnp.float32) if biased else None
    outputs = add_rms_norm_triton.add_rms_norm(x, update, weight, 1e-6, bias=bias, target=HOPPER)
    expected = add_rms_norm_reference.add_rms_norm(x, update, weight, 1e-6, bias)
    for output, wanted in zip(outputs, expected, strict=True):
        assert relative_error(output, wanted) < 1e-6


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("parts", [1, 3])
def test_attention_inputs(parts: int, options: str) -> None:
    rng = np.random.default_rng(parts)
    tokens, pages, q_heads, kv_heads, dim, page = 5, 4, 4, 2, 32, 4
    qkv = jnp.asarray(
        rng.standard_normal((parts, tokens, (q_heads + 2 * kv_heads) * dim)), jnp.float32
    )
    kv = jnp.asarray(rng.standard_normal((2, pages, kv_heads, 2, page, dim)), jnp.float32)
    heads = head_weights(options, q_heads, kv_heads, dim)
    angles = rng.uniform(0, 100, (tokens, dim // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    places = rng.choice(pages * page, tokens, replace=False).astype(np.int32)
    slots = KVSlots(jnp.asarray(places // page), jnp.asarray(places % page))
    given = (qkv, kv, 1, heads, tables, slots)
    outputs = attention_inputs_triton.attention_inputs(
        *given, eps=1e-6, dtype="float32", target=HOPPER
    )
    expected = attention_inputs(*given, eps=1e-6, dtype="float32", target=REFERENCE)
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
        ("later_chunks_at_page_and_tile_edges", 3),
        ("decode_in_a_window_of_one", 2),
        ("decode_at_page_edges_of_a_window", 1),
        ("decode_at_block_edges_of_a_window", 4),
        ("decode_in_small_pages", 2),
        ("chunks_across_the_window", 1),
        ("chunks_across_the_window", 3),
        ("chunks_and_decodes_in_a_window", 2),
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
            q,
            kv,
            inputs.layer,
            inputs.page_table,
            tiles,
            tile_size=spec.tile_size, window=spec.window,
            target=REFERENCE,
        )  # fmt: skip

    expected = jax.jit(reference)(inputs.q, inputs.kv)
    out = paged_attention_triton.paged_attention(
        jnp.asarray(inputs.q), jnp.asarray(inputs.kv), inputs.layer,
        jnp.asarray(inputs.page_table), jax.tree.map(jnp.asarray, tiles),
        AttentionConfig(splits=splits, num_warps=4, num_stages=3),
        tile_size=spec.tile_size, window=spec.window, target=HOPPER,
    )  # fmt: skip
    assert relative_error(out[used], expected[used]) < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        *("decode_at_page_edges", "decode_padded", "decode_with_one_head"),
        *("decode_at_block_edges_of_a_window", "decode_in_small_pages"),
    ],
)
@pytest.mark.parametrize("places", [4, 16, 64])
def test_decode_rows_beside_chunks(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many places share the contexts."""
    monkeypatch.setattr(triton_decode_rows, "_MIN_KEYS", 1)
    monkeypatch.setattr(triton_decode_rows, "_SHARED_PLACES", places)
    inputs = make_inputs(SPECS[name], seed=3)
    columns = (inputs.first, inputs.length, inputs.slot, inputs.position)
    tiles = QueryTiles(*(jnp.asarray(np.pad(column, (0, 3))) for column in columns))
    q, kv, table = (jnp.asarray(each) for each in (inputs.q, inputs.kv, inputs.page_table))
    expected = paged_attention(
        q, kv, inputs.layer, table, tiles, tile_size=1, window=SPECS[name].window, target=REFERENCE
    )
    used = inputs.first[inputs.length > 0]
    out = jax.new_ref(jnp.full_like(q, 7.0))
    triton_decode_rows.attend(
        q, kv, inputs.layer, table, tiles, out, window=SPECS[name].window, target=HOPPER
    )
    result = jax.freeze(out)
    assert relative_error(result[used], expected[used]) < 1e-6
    others = np.setdiff1d(np.arange(len(q)), used)
    np.testing.assert_array_equal(result[others], 7.0)
