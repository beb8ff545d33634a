"""The compiled steps, as an H100 would get them: compiled here, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("jax_plugins.xla_cuda13", "triton", "jax_triton")


def missing() -> list[str]:
    """Pieces of the GPU compiler that are not installed."""

    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    lacking = [module for module in NEEDED if not found(module)]
    has_ptxas = shutil.which("ptxas") or Path("/usr/local/cuda/bin/ptxas").exists()
    return lacking if has_ptxas else [*lacking, "ptxas"]


def inspect(*flags: str) -> dict[str, dict[str, Any]]:
    """What scripts/inspect_steps.py reports for the flags, by bucket."""
    if lacking := missing():
        pytest.skip(f"cannot compile for a GPU here, missing: {', '.join(lacking)}")
    command = [sys.executable, "scripts/inspect_steps.py", *flags]
    command += ["--target", "tests/aot/h100_80gb_hbm3.textproto"]
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return {report["bucket"]: report for report in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    """Of a Qwen3-4B with four layers, by bucket."""
    buckets = ("--decode", "1,2,16,24,64,256", "--prefill", "16,512,2048")
    return inspect("--layers", "4", *buckets)


def test_a_whole_step_is_one_cuda_graph(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], name


def test_a_step_has_few_arguments(reports: dict[str, dict[str, Any]]) -> None:
    assert {report["arguments"] for report in reports.values()} == {19}


def test_no_step_copies_the_kv_cache(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        assert report["kv_copies"] == 0, name
        assert report["aliased_bytes"] == report["state_bytes"], name


def test_a_step_has_no_outputs_but_its_state(reports: dict[str, dict[str, Any]]) -> None:
    """Theirs would be other memory in each step, and XLA keeps intermediates there, so that most
    nodes of the graph would have to be changed before each launch."""
    for name, report in reports.items():
        assert report["other_output_bytes"] < 1024, name  # the tuple's own pointers


def test_scratch_memory_stays_small(reports: dict[str, dict[str, Any]]) -> None:
    """Activations, and scores of 256 rows twice; a weight converted by mistake takes gigabytes."""
    for name, report in reports.items():
        assert report["scratch_bytes"] < 384 * 2**20, name


def test_layers_are_one_chain_of_kernels_or_nine_each(reports: dict[str, dict[str, Any]]) -> None:
    """Each is counted with the slice of the stacked weight that it reads, where it has one."""
    for bucket in ("decode_1", "decode_16", "decode_24"):
        assert reports[bucket]["inside_graph"] <= 24, bucket
    assert reports["decode_64"]["inside_graph"] <= 4 * 17 + 20


def test_a_step_with_quantised_weights_is_one_cuda_graph_too() -> None:
    """Products by unpacking, in e4m3, and with the output matrix in int8."""
    flags = ("--layers", "2", "--decode", "1,64", "--prefill", "512")
    reports = inspect(*flags, "--quantization", "int4", "--lm-head-dtype", "int8")
    assert reports["decode_1"]["inside_graph"] <= 25  # the layers are one chain
    for name, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], name
        assert report["kv_copies"] == 0, name
        assert report["scratch_bytes"] < 384 * 2**20, name


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "kvarn_k4v4_g128", "kvarn_k4v2_g128"])
def test_a_step_with_a_quantised_kv_cache_is_one_cuda_graph_too(name: str) -> None:
    """Its kernels also fit the card's shared memory: `triton_call` refuses those that do not."""
    flags = ("--layers", "2", "--decode", "32", "--prefill", "2048", "--kv-cache-dtype", name)
    reports = inspect(*flags)
    assert reports["decode_32"]["inside_graph"] <= 24  # the layers are one chain
    for bucket, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], bucket
        assert report["kv_copies"] == 0, bucket
        assert report["aliased_bytes"] == report["state_bytes"], bucket
        assert report["scratch_bytes"] < 1024 * 2**20, bucket
