"""Memory of a model with recurrent layers, and what such a model refuses."""

from __future__ import annotations

import pytest

from jaxserve.config import ConfigError
from tests.startup.pretended import H200, planned_on

FLAGS = ("--model", "qwen3.5-27b", "--load-format", "dummy")
STATE = 153_944_064
"""Bytes of one sequence of 27B: the recurrence in float32, the convolution in bfloat16."""


def test_state_and_snapshots_take_their_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_on(H200, monkeypatch, *FLAGS)
    config, parts = plan.config, plan.memory(0)
    slots = config.scheduler.max_num_seqs + 1 + config.cache.snapshots
    state = config.recurrent_state
    assert state is not None and state.delta.shape[:2] == (48, slots)
    assert config.scheduler.prefix_caching and config.cache.snapshots > 8
    assert config.buckets.verify, "drafts are looked up by default, as for other models"
    assert slots * STATE < parts.state < slots * STATE * 1.3
    assert parts.weights + parts.kv_cache + parts.state < parts.limit
    off = planned_on(H200, monkeypatch, *FLAGS, "--no-enable-prefix-caching")
    assert off.config.cache.snapshots == 0


def test_the_models_own_head_drafts_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planned_on(H200, monkeypatch, *FLAGS)
    chosen = '{"method": "qwen3_next_mtp", "num_speculative_tokens": 1}'
    plan = planned_on(H200, monkeypatch, *FLAGS, "--speculative-config", chosen)
    assert plain.head is None and plan.head is not None
    assert plan.config.draft == plan.head.spec and plan.head.spec.num_drafts == 1
    assert {positions for _, positions in plan.config.buckets.verify} == {2}
    assert plan.head.num_bytes == 2 * 424_673_280 + 4 * (5 * 5120 + 2 * 256)
    assert plan.config.kv_shapes[0].layers == 16 and plan.config.draft_kv.shape[0] == 1
    parts = plan.memory(0)
    assert parts.weights + parts.kv_cache + parts.state < parts.limit


def test_a_snapshot_fits_the_rings_of_a_tier_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_on(H200, monkeypatch, *FLAGS, "--kv-offload-size", "64Gi")
    host, rings = plan.host, plan.config.rings
    assert host is not None and rings is not None
    assert rings.store >= host.state_pieces == 48 and len(host.page_bytes) == 2
    assert host.state_pieces * host.page_bytes[1] == STATE
    parts = plan.memory(0)
    assert parts.weights + parts.kv_cache + parts.state < parts.limit


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "kvarn_k4v4_g128"])
def test_every_format_of_keys_and_values_goes_with_snapshots(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned_on(H200, monkeypatch, *FLAGS, "--kv-cache-dtype", name).config
    assert config.scheduler.prefix_caching and config.cache.snapshots > 8


def test_a_step_without_room_for_a_block_is_refused_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = (*FLAGS, "--max-num-seqs", "4", "--prefill-buckets", "64")
    with pytest.raises(ConfigError, match=r"no room for 3 decodes and a block of 64 .* to 67,"):
        planned_on(H200, monkeypatch, *flags)
    planned_on(H200, monkeypatch, *flags[:-1], "67")
