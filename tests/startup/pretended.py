"""Plans for GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.startup import gpu_driver
from jaxserve.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.weights.model_source import find_model


class Card(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    capability: str
    mebibytes: int


RTX_3060 = Card("NVIDIA GeForce RTX 3060", "8.6", 12_288)
RTX_4080 = Card("NVIDIA GeForce RTX 4080", "8.9", 16_376)
RTX_3090 = Card("NVIDIA GeForce RTX 3090", "8.6", 24_576)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", "8.9", 24_564)
L4 = Card("NVIDIA L4", "8.9", 23_034)
H100 = Card("NVIDIA H100 80GB HBM3", "9.0", 81_559)
H200 = Card("NVIDIA H200", "9.0", 143_771)


def planned_on(card: Card, monkeypatch: pytest.MonkeyPatch, *flags: str) -> EnginePlan:
    """What a start on the card would do, as far as it is known before weights are read."""
    device = SimpleNamespace(
        platform="gpu",
        device_kind=card.name,
        compute_capability=card.capability,
        memory_stats=lambda: None,  # as with the allocator that `environment.prepare` chooses
        client=SimpleNamespace(platform_version="cuda"),
    )
    options = parse_args([*flags])
    with monkeypatch.context() as here:
        here.setattr(jax, "devices", lambda: [device])
        here.setattr(gpu_driver, "total_memory", lambda: card.mebibytes * 2**20)
        share = str(options.gpu_memory_utilization)
        here.setenv("XLA_CLIENT_MEM_FRACTION", share)  # as `environment.prepare` leaves it
        return plan_engine(options, find_model(options))
