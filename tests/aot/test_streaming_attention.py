"""The attention of chains, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import compile_gluon, ptxas_report


@pytest.mark.parametrize(("qkv", "splits", "stages"), [("*fp32", 8, 2), ("*bf16", 1, 3)])
def test_past_keys_and_values_are_asked_for_before_the_kernels_before_it_end(
    qkv: str, splits: int, stages: int, tmp_path: Path
) -> None:
    """For Qwen3-4B's heads. A thread copies 16 bytes of eight rows of a page's keys, and as many
    of its values; ACQBULK is the wait."""
    import triton

    from jaxserve_kernels.paged_attention.triton_streaming import _attend

    bf16, fp32 = ("kv", "q_norm", "k_norm", "out"), ("cos", "sin", "part", "peak", "weight")
    types = {f"{name}_ptr": "*bf16" for name in bf16} | {f"{name}_ptr": "*fp32" for name in fp32}
    constants: dict[str, Any] = {
        "stride": 6144, "table_stride": 640, "parts": 4, "eps": 1e-6, "scale": 0.1, "q_heads": 32,
        "kv_heads": 8, "ROWS": 16, "DIM": 128, "PAGE": 64, "SPLITS": splits, "MIN_BLOCKS": 1,
        "STAGES": stages, "EARLY": True,
    }  # fmt: skip
    kernel = compile_gluon(_attend, types | {"qkv_ptr": qkv, "first_page": "i32"}, constants)
    report = ptxas_report(kernel, tmp_path)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert registers and int(registers[1]) <= 168  # three programs for each multiprocessor
    assert kernel.metadata.shared <= 34 * 1024 * stages + 4 * 1024
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    code = subprocess.run(
        [nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    before, _ = code.rsplit("ACQBULK", 1)
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", before)) == 16 * stages
