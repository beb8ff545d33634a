"""A verify step as XLA compiles it for an H100: attention takes its rows as chunks."""

from __future__ import annotations

import pytest

from tests.aot.compiled_steps import inspect


@pytest.mark.parametrize("name", ["auto", "int8", "kvarn_k4v2_g128"])
def test_a_verify_step_is_one_cuda_graph_that_copies_no_state(name: str) -> None:
    flags = ("--layers", "2", "--decode=", "--prefill=", "--verify", "8x8")
    (report,) = inspect(*flags, "--kv-cache-dtype", name).values()
    assert report["bucket"] == "verify_8x8"
    assert report["outside_graph"] == ["kCommandBuffer"]
    assert report["kv_copies"] == report["table_copies"] == 0
    assert report["aliased_bytes"] == report["state_bytes"]
    assert report["scratch_bytes"] < 1024 * 2**20


@pytest.mark.slow
def test_state_that_cannot_be_taken_back_is_read_and_then_written_in_place() -> None:
    flags = ("--model", "qwen3.5-27b", "--layers", "4", "--decode=", "--prefill=")
    (report,) = inspect(*flags, "--verify", "8x8").values()
    assert report["outside_graph"] == ["kCommandBuffer"]
    assert report["kv_copies"] == report["table_copies"] == 0
    assert report["aliased_bytes"] == report["state_bytes"]
    assert report["scratch_bytes"] < 1024 * 2**20


@pytest.mark.parametrize("name", ["auto", pytest.param("kvarn_k4v2_g128", marks=pytest.mark.slow)])
def test_a_draft_head_is_a_part_of_the_graph(name: str) -> None:
    """Of DeepSpec's sizes: its layers, and seven draws one after the other."""
    flags = ("--layers", "2", "--decode", "8", "--prefill=", "--verify", "4x8")
    flags += ("--kv-cache-dtype", name)
    decode, verify = inspect(*flags, "--draft-head", "dspark").values()
    for report in (decode, verify):
        assert report["outside_graph"] == ["kCommandBuffer"]
        assert report["kv_copies"] == report["table_copies"] == 0
        assert report["aliased_bytes"] == report["state_bytes"]
    assert verify["scratch_bytes"] < 1024 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_a_models_own_head_is_a_part_of_the_graph(model: str) -> None:
    """Beside delta nets, dense and with experts."""
    flags = ("--model", model, "--layers", "4", "--decode", "8", "--prefill=")
    reports = inspect(*flags, "--verify", "4x4", "--draft-head", "mtp")
    assert set(reports) == {"decode_8", "verify_4x4"}
    for report in reports.values():
        assert report["outside_graph"] == ["kCommandBuffer"]
        assert report["kv_copies"] == report["table_copies"] == 0
        assert report["aliased_bytes"] == report["state_bytes"]
        assert report["scratch_bytes"] < 1024 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-8b"])
def test_an_eagle3_head_is_a_part_of_the_graph(model: str) -> None:
    """Of the sizes that are published, with 32,000 tokens of its own: seven passes."""
    flags = ("--model", model, "--layers", "4", "--decode", "8", "--prefill", "512")
    reports = inspect(*flags, "--verify", "4x8", "--draft-head", "eagle3")
    assert set(reports) == {"decode_8", "mixed_512", "verify_4x8"}
    for report in reports.values():
        assert report["outside_graph"] == ["kCommandBuffer"]
        assert report["kv_copies"] == report["table_copies"] == 0
        assert report["aliased_bytes"] == report["state_bytes"]
    assert reports["verify_4x8"]["scratch_bytes"] < 1024 * 2**20
