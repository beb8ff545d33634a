"""Memory of the device: whose limit counts, and which failures are for want of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.config import ConfigError
from jaxserve.startup import memory


def card(statistics: dict[str, int] | None) -> Any:
    return SimpleNamespace(platform="gpu", memory_stats=lambda: statistics)


def test_the_allocator_s_own_limit_comes_first() -> None:
    assert memory.device_limit(card({"bytes_limit": 70}), 72) == 70


@pytest.mark.parametrize("statistics", [None, {}, {"bytes_limit": 0}])
def test_an_allocator_without_statistics_takes_a_share_of_the_card(statistics: Any) -> None:
    assert memory.device_limit(card(statistics), 72) == 72
    with pytest.raises(ConfigError, match="how much memory there is"):
        memory.device_limit(card(statistics), 0)


@pytest.mark.parametrize(
    ("text", "wanting"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.2GiB", True),
        ("INTERNAL: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", False),
    ],
)
def test_want_of_memory_is_told_from_other_failures(text: str, wanting: bool) -> None:
    assert memory.is_exhausted(jax.errors.JaxRuntimeError(text)) == wanting
