"""The size of the KV cache, and the number of pages that a memory budget holds."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxserve.config import CacheConfig, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve_kernels.kv_format import CacheShape, KVFormat, fixed_bytes, own_tokens, page_bytes


def shape(spec: ModelSpec, cache: CacheConfig, max_num_seqs: int) -> CacheShape:
    """Returns the shape of the cache, which a KV format lays out."""
    return CacheShape(
        layers=spec.num_layers,
        pages=cache.num_pages,
        kv_heads=spec.kv_heads,
        page_size=cache.page_size,
        head_dim=spec.head_dim,
        slots=max_num_seqs + 1,
    )


def total_bytes(kv_format: KVFormat, cache: CacheShape, dtype: DTypeLike) -> int:
    """Returns the bytes of the whole cache. `dtype`: of activations."""
    each = page_bytes(kv_format, cache, dtype)
    return cache.pages * each + fixed_bytes(kv_format, cache, dtype)


def num_pages(kv_format: KVFormat, one_page: CacheShape, dtype: DTypeLike, budget: int) -> int:
    """Returns how many pages `budget` bytes hold. `one_page.pages` is ignored."""
    fixed = fixed_bytes(kv_format, one_page, dtype)
    return max(budget - fixed, 0) // page_bytes(kv_format, one_page, dtype)


def fit_pages(
    kv_format: KVFormat, one_page: CacheShape, dtype: DTypeLike, budget: int, max_model_len: int
) -> CacheConfig:
    """Returns a cache with as many pages as `budget` bytes hold. `one_page.pages` is ignored.

    Raises:
      ConfigError: not even one sequence of max_model_len tokens fits.
    """
    each = page_bytes(kv_format, one_page, dtype)
    fixed = fixed_bytes(kv_format, one_page, dtype)
    pages = num_pages(kv_format, one_page, dtype, budget)
    needed = -(-max_model_len // one_page.page_size) + 1
    if pages < needed:
        fits = max(pages - 1, 0) * one_page.page_size
        beside = f" ({fixed / 2**20:,.0f} MiB of it beside the pages)" if fixed > 2**20 else ""
        lower = "--max-model-len"
        if beside:
            lower = "--max-num-seqs" if fixed > budget else "--max-model-len, --max-num-seqs"
        raise ConfigError(
            f"too little memory: the KV cache gets {budget / 2**20:,.0f} MiB, which holds {fits} "
            f"tokens, but one sequence of max_model_len {max_model_len} needs "
            f"{(needed * each + fixed) / 2**20:,.0f} MiB{beside}; lower {lower}, or "
            "give it more: --kv-cache-memory-bytes, or memory that something else takes"
        )
    return CacheConfig(
        num_pages=pages, page_size=one_page.page_size, own_tokens=own_tokens(kv_format)
    )
