"""Memory of the device: whose limit counts, and which failures are for want of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.startup import memory
from jaxserve.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.weights.model_source import find_model


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


def test_a_copy_of_weights_takes_a_tenth_of_the_cache_s_memory_at_most() -> None:
    assert memory.affords_copy(10, 100, None)
    assert not memory.affords_copy(11, 100, None)
    assert memory.affords_copy(10, 100, 90)
    assert not memory.affords_copy(10, 100, 91)


def test_programs_and_the_memory_plan_know_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has none, unless it is asked for."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")  # as environment.prepare leaves it

    def planned(choice: str) -> EnginePlan:
        flags = ["--quantization", "int4", "--fp8-copy", choice, "--cache-dir", str(tmp_path)]
        options = parse_args(flags)
        return plan_engine(options, find_model(options))

    on, off, auto = map(planned, ("on", "off", "auto"))
    more = memory.tree_bytes(on.weights.served) - memory.tree_bytes(on.weights.encoded)
    assert on.memory(0).weights - off.memory(0).weights == more > 0
    assert on.cache.folder != off.cache.folder == auto.cache.folder
    assert {each.name for each in on.programs} > {each.name for each in off.programs}
