"""The KV cache: its shape, and how many pages a memory budget holds."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.config import CacheConfig, ConfigError, ModelSpec


def shape(spec: ModelSpec, cache: CacheConfig) -> tuple[int, ...]:
    """[layers, pages, kv_heads, 2, page_size, head_dim]: one head's page is contiguous."""
    return (
        spec.num_layers,
        cache.num_pages,
        spec.kv_heads,
        2,
        cache.page_size,
        spec.head_dim,
    )


def page_bytes(spec: ModelSpec, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page in all layers."""
    return spec.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * page_size


def fit_pages(
    spec: ModelSpec, page_size: int, dtype: DTypeLike, budget: int, max_model_len: int
) -> CacheConfig:
    """As many pages as `budget` bytes hold.

    Raises:
      ConfigError: not even one sequence of max_model_len tokens fits.
    """
    each = page_bytes(spec, page_size, dtype)
    pages = max(budget, 0) // each
    needed = -(-max_model_len // page_size) + 1
    if pages < needed:
        fits = max(pages - 1, 0) * page_size
        raise ConfigError(
            f"too little memory: the KV cache gets {budget / 2**30:.2f} GiB, which holds {fits} "
            f"tokens, but one sequence of max_model_len {max_model_len} needs "
            f"{needed * each / 2**30:.2f} GiB; lower --max-model-len or free memory"
        )
    return CacheConfig(num_pages=pages, page_size=page_size)
