"""Run by tests/aot/test_interpreted_kernels.py, in a process in which Triton interprets."""

from __future__ import annotations

from typing import Any

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
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention, triton_singles
from jaxserve_kernels.paged_attention import triton as paged_attention_triton
from jaxserve_kernels.paged_attention.config import Config as AttentionConfig
from jaxserve_kernels.paged_attention.inputs import make_inputs
from jaxserve_kernels.paged_attention.specs import SMALL_SPECS
from jaxserve_kernels.sampler import (
    IN_PROMPT,
    MAX_BIASES,
    SUPPRESSED,
    RowAdjustments,
    RowSampling,
    SlotTables,
    triton_scan,
    triton_select,
)
from jaxserve_kernels.sampler import reference as sampler_reference
from jaxserve_kernels.sampler import triton as sampler_triton
from tests.kernels.interpreter import tensor_range

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
        ("later_chunks_at_page_and_tile_edges", 3),
    ],
)
def test_paged_attention(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    if spec.tile_size > 1:  # as where there are many tiles
        monkeypatch.setattr(paged_attention_triton, "_MANY_PROGRAMS", 0)
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
        jnp.asarray(inputs.page_table), jax.tree.map(jnp.asarray, tiles),
        tile_size=spec.tile_size, config=AttentionConfig(splits=splits, num_warps=4, num_stages=3),
    )  # fmt: skip
    assert relative_error(out[used], expected[used]) < 1e-6


@pytest.mark.parametrize("name", ["decode_at_page_edges", "decode_padded", "decode_with_one_head"])
@pytest.mark.parametrize("places", [4, 16, 64])
def test_singles_beside_chunks(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many places share the contexts."""
    monkeypatch.setattr(triton_singles, "_MIN_KEYS", 1)
    monkeypatch.setattr(triton_singles, "_SHARED_PLACES", places)
    inputs = make_inputs(SPECS[name], seed=3)
    columns = (inputs.first, inputs.length, inputs.slot, inputs.position)
    tiles = QueryTiles(*(jnp.asarray(np.pad(column, (0, 3))) for column in columns))
    q, kv, table = (jnp.asarray(each) for each in (inputs.q, inputs.kv, inputs.page_table))
    with target.use(target.Target("reference")):
        expected = paged_attention(q, kv, inputs.layer, table, tiles, tile_size=1)
    used = inputs.first[inputs.length > 0]
    out = jax.new_ref(jnp.full_like(q, 7.0))
    triton_singles.attend(q, kv, inputs.layer, table, tiles, out)
    result = jax.freeze(out)
    assert relative_error(result[used], expected[used]) < 1e-6
    others = np.setdiff1d(np.arange(len(q)), used)
    np.testing.assert_array_equal(result[others], 7.0)


def sampler_inputs(seed: int, *, rows: int, vocab: int, padded: int) -> tuple[Any, ...]:
    """Every kind of sampling with every feature, by chance."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, padded)).astype(np.float32)
    logits[:, vocab:] = 100.0

    def column(*values: float, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.choice(values, rows), dtype)

    sampling = RowSampling(
        active=jnp.asarray(rng.random(rows) < 0.9),
        temperature=column(0.0, 0.3, 1.0, 2.0),
        top_k=column(0, 0, 5, 64, 100, dtype="int32"),
        top_p=column(1.0, 1.0, 0.9, 0.3),
        min_p=column(0.0, 0.0, 0.1),
        seed=jnp.asarray(rng.integers(-(2**31), 2**31, rows), jnp.int32),
        position=jnp.asarray(rng.integers(1, 40_000, rows), jnp.int32),
    )
    slots = rows + 2
    counts = rng.integers(0, 5, (slots, padded)) * (rng.random((slots, padded)) < 0.2)
    counts = np.where(rng.random(counts.shape) < 0.2, counts | IN_PROMPT, counts)
    biases = np.full((slots, 3, MAX_BIASES), 2**31 - 1, np.int32)
    for row in biases:
        count = rng.integers(1, 40)
        row[0, :count] = np.sort(rng.integers(0, vocab, count))
        row[1, :count] = rng.choice([-100.0, 5.0, SUPPRESSED], count).astype("f4").view("i4")
        row[2, :count] = rng.choice([10, 20_000, 2**31 - 1], count)
    masks = rng.integers(-(2**31), 2**31, (slots, padded // 32))
    masks[::3, 1:] = 0
    tables = SlotTables(
        jnp.asarray(counts, jnp.int16),
        jnp.asarray(biases.reshape(slots, -1)),
        jnp.asarray(masks, jnp.int32),
    )
    adjustments = RowAdjustments(
        features=column(0, 0, 1, 2, 3, 4, 5, 6, 7, dtype="int32"),
        slots=jnp.asarray(rng.permutation(slots)[:rows], jnp.int32),
        presence=column(-2.0, 0.0, 1.5),
        frequency=column(-1.0, 0.0, 2.0),
        repetition=column(1.0, 1.3, 0.7, 1e-9),
    )
    return jnp.asarray(logits), sampling, adjustments, tables, jnp.asarray(rng.random(rows) < 0.5)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # what is too large is clipped
def test_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    for kernels in (triton_scan, triton_select):
        monkeypatch.setattr(kernels, "range", tensor_range, raising=False)
    inputs = sampler_inputs(0, rows=16, vocab=300, padded=320)
    got = sampler_triton.sample(*inputs, vocab=300, alternatives=20)
    expected = sampler_reference.sample(*inputs, vocab=300, alternatives=20)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.tables.counts, expected.tables.counts)
    wanted = np.asarray(inputs[-1])
    np.testing.assert_array_equal(got.logprobs.top_ids[wanted], expected.logprobs.top_ids[wanted])
    np.testing.assert_allclose(
        got.logprobs.top[wanted], expected.logprobs.top[wanted], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        got.logprobs.sampled, expected.logprobs.sampled, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy is not used to such scores
@pytest.mark.parametrize(
    ("bad", "temperature", "top_k", "top_p", "min_p"),
    [
        (np.nan, 0.0, 0, 1.0, 0.0),
        (np.nan, 1.0, 0, 0.9, 0.0),
        (np.nan, 1.0, 100, 1.0, 0.0),
        (-np.inf, 1.0, 100, 1.0, 0.0),
        (np.nan, 1.0, 20, 1.0, 0.0),
        (np.inf, 1.0, 100, 1.0, 0.1),
    ],
)
def test_scores_that_are_no_numbers_still_choose_a_token_that_exists(
    monkeypatch: pytest.MonkeyPatch,
    bad: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Its score is read and its count written; the logprob tells that the row is worth nothing."""
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    for kernels in (triton_scan, triton_select):
        monkeypatch.setattr(kernels, "range", tensor_range, raising=False)
    logits, sampling, adjustments, tables, _ = sampler_inputs(0, rows=2, vocab=300, padded=320)
    none, one = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.float32)
    sampling = sampling._replace(
        active=none == 0, temperature=temperature * one, top_k=none + top_k,
        top_p=top_p * one, min_p=min_p * one,
    )  # fmt: skip
    adjustments = adjustments._replace(features=none)
    first = logits.at[0, 5].set(bad) if bad == np.inf else logits.at[0].set(jnp.float32(bad))

    def sample(logits: Any) -> Any:
        return sampler_triton.sample(
            logits, sampling, adjustments, tables, none != 0, vocab=300, alternatives=20
        )

    got, without = sample(first), sample(logits)
    assert 0 <= int(got.tokens[0]) < 300
    assert np.isnan(got.logprobs.sampled[0])
    assert got.tokens[1] == without.tokens[1]


def test_scores_of_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_triton, "_CHUNK", 64)
    for kernels in (triton_scan, triton_select):
        monkeypatch.setattr(kernels, "range", tensor_range, raising=False)
    logits = sampler_inputs(1, rows=6, vocab=300, padded=320)[0]
    tokens = jnp.asarray([0, 299, 7, 64, 63, 128], jnp.int32)
    got = sampler_triton.score(logits, tokens, vocab=300, alternatives=20)
    expected = sampler_reference.score(logits, tokens, vocab=300, alternatives=20)
    np.testing.assert_array_equal(got.rank, expected.rank)
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_allclose(got.logprob, expected.logprob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.top, expected.top, rtol=1e-5, atol=1e-5)
