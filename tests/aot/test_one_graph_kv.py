"""The same with quantised KV caches: in a file of its own, so that both are compiled at once."""

from __future__ import annotations

import pytest

from tests.aot.compiled_steps import inspect


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "kvarn_k4v4_g128", "kvarn_k4v2_g128"])
def test_a_step_with_a_quantised_kv_cache_is_one_cuda_graph(name: str) -> None:
    """Its kernels also fit the card's shared memory: `triton_call` refuses those that do not."""
    flags = ("--layers", "2", "--decode", "32", "--prefill", "2048", "--kv-cache-dtype", name)
    reports = inspect(*flags)
    assert reports["decode_32"]["inside_graph"] <= 24  # the layers are one call
    for bucket, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], bucket
        assert report["kv_copies"] == 0, bucket
        assert report["aliased_bytes"] == report["state_bytes"], bucket
        assert report["scratch_bytes"] < 1024 * 2**20, bucket
