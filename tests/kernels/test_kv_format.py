"""KV formats: their names, and the bytes that they take."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import KV_CACHE_DTYPES, CacheConfig, ConfigError
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.runner import kv_cache
from jaxserve_kernels import kv_format
from jaxserve_kernels.attention_inputs.reference import heads_of
from jaxserve_kernels.kv_format import CacheShape, KVFormat
from jaxserve_kernels.paged_attention.reference import paged_attention
from jaxserve_kernels.target import CPU
from tests.kernels.kv_steps import EPS, Sequences

QWEN3_4B = NAMED_MODELS["qwen3-4b"]


def shape(page_size: int = 64, pages: int = 2, max_num_seqs: int = 256) -> CacheShape:
    cache = CacheConfig(num_pages=pages, page_size=page_size)
    return kv_cache.shapes(QWEN3_4B, cache, max_num_seqs)[0]


def fit_pages(found: KVFormat, one_page: CacheShape, budget: int) -> int:
    """For sequences of up to 4,096 tokens."""
    demand = kv_cache.Demand(4096, one_page.slots - 1, 2048)
    group = kv_cache.SizedGroup(one_page)
    return kv_cache.fit_pages(found, [group], jnp.bfloat16, budget, demand)[0]


def test_the_flag_offers_every_format() -> None:
    assert "auto" in KV_CACHE_DTYPES
    for name in KV_CACHE_DTYPES:
        assert kv_format.named(name).name == name


@pytest.mark.parametrize("name", kv_format.NAMES)
def test_a_cache_tells_its_format_and_its_page_size(name: str) -> None:
    found = kv_format.named(name)
    page_size = found.page_size or 16
    arrays = found.abstract(shape(page_size), jnp.bfloat16)
    told = kv_format.format_of(arrays)
    assert told.abstract(shape(page_size), jnp.bfloat16) == arrays
    assert kv_format.page_size(arrays) == page_size


def test_scales_of_a_format_without_any_are_refused() -> None:
    found = kv_format.named("int8")
    with pytest.raises(TypeError, match="int8 has no scales"):
        found.with_scales(found.abstract(shape(), jnp.float32), np.ones((36, 8, 2)))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("auto", 147_456),
        ("bf16", 147_456),
        ("fp8_e4m3", 73_728),
        ("int8", 76_032),
        ("kvarn_k4v4_g128", 40_320),
        ("kvarn_k4v2_g128", 31_104),
    ],
)
def test_a_token_of_qwen3_4b_takes_so_many_bytes(name: str, bytes_per_token: float) -> None:
    found = kv_format.named(name)
    page_size = found.page_size or 64
    each = found.page_bytes(shape(page_size), jnp.bfloat16)
    assert each / page_size == bytes_per_token


def test_pages_fill_the_budget_and_no_more() -> None:
    found = kv_format.named("bf16")
    each = found.page_bytes(shape(), jnp.bfloat16)
    assert fit_pages(found, shape(), 1000 * each + each // 2) == 1000
    assert kv_cache.total_bytes([found], [shape(pages=1000)], jnp.bfloat16) == 1000 * each


def test_a_budget_below_one_sequence_is_refused_with_the_numbers() -> None:
    found = kv_format.named("bf16")
    with pytest.raises(ConfigError, match=r" 0 MiB, which holds 0 .* 58\d MiB"):
        fit_pages(found, shape(), 1000)


@pytest.mark.parametrize("name", ["kvarn_k4v4_g128", "kvarn_k4v2_g128"])
def test_every_sequence_has_a_sink_and_a_tail_within_the_budget(name: str) -> None:
    """36 MiB for each of Qwen3-4B that may run, and for the padding slot, whatever runs; pages get
    the rest. So what is kept in full precision never limits how many sequences run."""
    found, one_page, budget = kv_format.named(name), shape(page_size=128), 20 * 2**30
    each = found.page_bytes(one_page, jnp.bfloat16)
    beside = found.fixed_bytes(one_page, jnp.bfloat16)
    assert beside == 257 * 36 * 2**20
    pages = fit_pages(found, one_page, budget)
    assert pages == (budget - beside) // each
    taken = kv_cache.total_bytes([found], [shape(128, pages)], jnp.bfloat16)
    assert budget - each < taken <= budget
    arrays = found.abstract(shape(128, pages), jnp.bfloat16)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)) == taken
    assert found.own_tokens == 128, "the sink of a sequence that finds its beginning"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("fp8_e4m3", 1.9),
        ("int8", 1.9),
        ("kvarn_k4v4_g128", 2.8),
        ("kvarn_k4v2_g128", 3.2),
    ],
)
def test_so_many_more_sequences_of_4096_tokens_fit(name: str, least: float) -> None:
    """With what is kept beside the pages for each of them."""

    def sequences(name: str, budget: int = 60 * 2**30) -> int:
        found, page_size = kv_format.named(name), kv_format.named(name).page_size or 64
        fits = 1
        while True:
            one_page = shape(page_size, max_num_seqs=fits + 1)
            if fit_pages(found, one_page, budget) - 1 < (fits + 1) * 4096 // page_size:
                return fits
            fits += 1

    assert sequences(name) >= least * sequences("bf16")


def test_what_the_slots_take_beyond_the_budget_is_said() -> None:
    found = kv_format.named("kvarn_k4v2_g128")
    with pytest.raises(ConfigError, match=r"9,252 MiB of it beside the pages\); lower --max-num-s"):
        fit_pages(found, shape(page_size=128), 8 * 2**30)


def test_in_a_float32_model_bf16_rounds_keys_and_values_and_nothing_else() -> None:
    sequences = Sequences(lengths=(9, 30), page_size=8)
    step = sequences.step((0, 0), (9, 30), 4)
    qkv, tables = sequences.projections(step)
    run: Any = jax.jit(
        partial(kv_format.attend, layer=0, eps=EPS, tile_size=4, dtype=sequences.dtype, target=CPU)
    )

    def attend(name: str) -> tuple[jax.Array, jax.Array]:
        kv = kv_format.named(name).allocate(sequences.shape, jnp.float32)
        return run(qkv, kv, heads=sequences.heads, tables=tables, step=step)

    exact, plain = attend("auto")
    out, kept = attend("bf16")
    assert out.dtype == jnp.float32 and kept.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept[0, 1:], plain[0, 1:].astype(jnp.bfloat16))
    over_kept = paged_attention(
        heads_of(qkv, sequences.heads, tables, kv_heads=2, eps=EPS, dtype=sequences.dtype)[0],
        kept.astype(jnp.float32), 0, step.page_table, step.tiles, tile_size=4,
    )  # fmt: skip
    np.testing.assert_allclose(out, over_kept, rtol=0, atol=1e-6)
    assert 1e-4 < float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)) < 4e-3


OFTEN = ("auto", "int8", "kvarn_k4v4_g128")
"""One of each kind; compiling with the others is for the slow tests."""


@pytest.mark.parametrize(("counts", "tile_size"), [((1, 1), 1), ((40, 150), 16)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
        for name in kv_format.NAMES
    ],
)
def test_a_step_changes_its_cache_in_place(
    name: str, counts: tuple[int, int], tile_size: int
) -> None:
    """Copies of sinks and tails were nine tenths of a decode step with KVarN on a CPU."""
    found = kv_format.named(name)
    sequences = Sequences(lengths=(300, 300), page_size=found.page_size or 16)
    step = sequences.step((100, 100), counts, tile_size)
    qkv, tables = sequences.projections(step)

    def layers(kv: Any, qkv: Any, tables: Any, step: Any) -> Any:
        run = partial(
            kv_format.attend, eps=EPS, tile_size=tile_size, dtype=sequences.dtype, target=CPU
        )
        for layer in range(2):
            out, kv = run(qkv, kv, layer, sequences.heads, tables, step)
            qkv = qkv + jnp.sum(out)
        return out, kv_format.end_step(kv, step, tile_size=tile_size, target=CPU)

    large = dataclasses.replace(sequences.shape, pages=2**18 // sequences.page_size, slots=2048)
    cache = found.abstract(large, jnp.float32)
    compiled = jax.jit(layers, donate_argnums=0).lower(cache, qkv, tables, step).compile()
    stores = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(stores)
    assert memory.temp_size_in_bytes < max(stores) / 4
