"""KV formats: their names, and the bytes that they take."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.config import KV_CACHE_DTYPES, CacheConfig, ConfigError
from jaxserve.model_spec import NAMED_MODELS
from jaxserve.runner import kv_cache
from jaxserve_kernels import kv_format
from jaxserve_kernels.kv_format import CacheShape

QWEN3_4B = NAMED_MODELS["qwen3-4b"]


def shape(page_size: int = 64, pages: int = 2, max_num_seqs: int = 256) -> CacheShape:
    cache = CacheConfig(num_pages=pages, page_size=page_size)
    return kv_cache.shape(QWEN3_4B, cache, max_num_seqs)


def test_the_flag_offers_every_format() -> None:
    assert KV_CACHE_DTYPES == kv_format.NAMES
    for name in kv_format.NAMES:
        assert kv_format.named(name).name == name


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
    each = kv_format.page_bytes(found, shape(page_size), jnp.bfloat16)
    assert each / page_size == bytes_per_token


def test_pages_fill_the_budget_and_no_more() -> None:
    found = kv_format.named("bf16")
    each = kv_format.page_bytes(found, shape(), jnp.bfloat16)
    cache = kv_cache.fit_pages(found, shape(), jnp.bfloat16, 1000 * each + each // 2, 4096)
    assert cache.num_pages == 1000
    whole = shape(pages=cache.num_pages)
    assert kv_cache.total_bytes(found, whole, jnp.bfloat16) == 1000 * each


def test_a_budget_below_one_sequence_is_refused_with_the_numbers() -> None:
    found = kv_format.named("bf16")
    with pytest.raises(ConfigError, match=r" 0 MiB, which holds 0 .* 58\d MiB"):
        kv_cache.fit_pages(found, shape(), jnp.bfloat16, 1000, 4096)
