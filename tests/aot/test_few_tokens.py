"""The product of few tokens with 4-bit integers, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import compile_gluon, ptxas_report

STEPS = 5


def compiled(tokens: int, group: int, early: bool) -> Any:
    """Gate and up of Qwen3-4B, as the dispatch launches them."""
    from jaxserve_kernels.quantized_matmul.triton_few import _product

    types = {
        "x_ptr": "*bf16", "packed_ptr": "*u16", "scale_ptr": "*fp32", "zero_ptr": "*fp32",
        "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "tokens": tokens, "n": 9728, "k": 2560, "GATED": True, "KIND": 2, "GROUP": group, "ZERO": 0,
        "TOKENS": 8, "ROWS": 16, "STEPS": STEPS, "WARPS": 4, "EARLY": early,
    }  # fmt: skip
    return compile_gluon(_product, types, constants)


@pytest.mark.parametrize(("tokens", "group", "early"), [(1, 128, True), (8, 64, False)])
def test_all_codes_are_asked_for_before_the_first_is_used(
    tokens: int, group: int, early: bool, tmp_path: Path
) -> None:
    """A thread's codes of a tile are 16 bytes of each of two rows; in a chain they are asked for
    before the kernel waits for those before it (ACQBULK)."""
    import triton

    kernel = compiled(tokens, group, early)
    report = ptxas_report(kernel, tmp_path)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert registers and int(registers[1]) <= 128  # four programs for each multiprocessor
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    code = subprocess.run(
        [nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    before, _ = code.split("ACQBULK" if early else "HMMA.16816", 1)
    assert len(re.findall(r"LDG\.E\.128", before)) >= 2 * STEPS
