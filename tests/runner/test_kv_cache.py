"""How memory is split among cache groups."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.config import ConfigError
from jaxserve.model_spec import CachePlace, ModelSpec
from jaxserve.runner import kv_cache
from jaxserve.runner.kv_cache import Demand
from jaxserve_kernels.kv_format import named
from tests.runner.test_windows import with_windows

PAGE = 16
DEMAND = Demand(max_model_len=1024, sequences=4, step_tokens=64)
DENSE = named("auto")


def pages(spec: ModelSpec, budget: int, demand: Demand = DEMAND) -> list[int]:
    groups = kv_cache.sized_groups(spec, PAGE, demand.sequences)
    return kv_cache.fit_pages(DENSE, groups, jnp.float32, budget, demand)


def layer_page_bytes(spec: ModelSpec) -> int:
    groups = kv_cache.sized_groups(spec, PAGE, DEMAND.sequences)
    whole = sum(DENSE.page_bytes(group.shape, jnp.float32) for group in groups)
    return whole // spec.num_layers


def test_layers_are_grouped_by_what_they_see() -> None:
    spec = with_windows(7, None, 7, 5)
    assert [(group.window, group.layers) for group in spec.cache_groups] == [
        (None, (1,)),
        (5, (3,)),
        (7, (0, 2)),
    ]
    places = [CachePlace(2, 0), CachePlace(0, 0), CachePlace(2, 1), CachePlace(1, 0)]
    assert list(spec.cache_places) == places
    assert [group.window for group in spec.within(7).cache_groups] == [None, 5]
    assert spec.within(5) == with_windows(None, None, None, None)


def test_what_a_window_cannot_use_goes_to_the_groups_without() -> None:
    spec = with_windows(32, None, 32, None)
    budget = 1000 * spec.num_layers * layer_page_bytes(spec)
    full, window = pages(spec, budget)
    # Twice four sequences of three pages, and a chunk of four pages.
    assert window == 2 * 4 * 3 + 4 + 1
    assert full == (budget // layer_page_bytes(spec) - 2 * window) // 2
    assert budget - 2 * layer_page_bytes(spec) < 2 * (full + window) * layer_page_bytes(spec)


def test_where_sequences_are_short_against_the_window_all_groups_get_equally_many() -> None:
    spec = with_windows(1000, None)
    assert pages(spec, 100 * 2 * layer_page_bytes(spec)) == [100, 100]


def test_a_model_of_windows_alone_gets_all_memory() -> None:
    spec = with_windows(32, 32)
    assert pages(spec, 5000 * 2 * layer_page_bytes(spec)) == [5000]


def test_a_sequence_longer_than_the_pool_fits_a_window() -> None:
    spec = with_windows(32, 32)
    budget = 4 * 2 * layer_page_bytes(spec)
    assert pages(spec, budget) == [4]
    cache = kv_cache.cache_config(spec, [4], PAGE)
    assert cache.longest > 1024 > cache.usable_tokens
    with pytest.raises(ConfigError, match="too little memory"):
        pages(spec, budget - 1)
    with pytest.raises(ConfigError, match="too little memory"):
        pages(with_windows(32, None), 40 * 2 * layer_page_bytes(spec))


def test_a_cache_of_other_groups_is_refused() -> None:
    cache = kv_cache.cache_config(with_windows(None, None), [10], PAGE)
    with pytest.raises(ConfigError, match="other groups"):
        kv_cache.shapes(with_windows(None, 7), cache, 4)
