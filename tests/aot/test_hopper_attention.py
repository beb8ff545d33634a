"""The attention kernel for Hopper, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
PTXAS = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
if not Path(PTXAS).exists():
    pytest.skip("the CUDA toolkit's ptxas is not installed", allow_module_level=True)


@pytest.fixture(scope="module", params=[1, 8], ids=["whole", "split"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """For Qwen3-4B's heads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from jaxserve_kernels.paged_attention.hopper import _program

    constants: dict[str, Any] = {
        "scale": 0.1, "q_heads": 32, "kv_heads": 8, "TOKENS": 16, "ROWS": 128, "DIM": 128,
        "PAGE": 64, "SPLITS": request.param, "MIN_PAGES": 8, "STAGES": 4,
    }  # fmt: skip
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    types = {
        "q_ptr": "*bf16",
        "kv": f"tensordesc<bf16[64, 128],{layout!r}>",
        "first_page": "i32",
        "out_ptr": "*bf16",
        "part_ptr": "*fp32",
        "peak_ptr": "*fp32",
        "weight_ptr": "*fp32",
        "table_stride": "i32",
    }
    names = _program.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32") for name in names
    }
    aligned = [name for name in names if name.endswith("_ptr")]
    source = GluonASTSource(
        _program,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.fixture(scope="module")
def report(kernel: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    command = [PTXAS, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return result.stderr


def test_nothing_leaves_the_registers(report: str) -> None:
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)


def test_products_are_not_made_to_wait_for_each_other(report: str) -> None:
    """ptxas warns where it cannot leave a product running (C7510)."""
    assert "wgmma" not in report, report


def test_consumers_get_the_registers_that_the_producer_gives_up(kernel: Any) -> None:
    given = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", kernel.asm["ptx"])
    assert ("inc", "240") in given and ("dec", "24") in given
    assert kernel.metadata.num_warps == 12


def test_the_softmax_runs_under_the_product_of_the_page_before(kernel: Any) -> None:
    """Between the waits for this page's scores and for the last page's values are the exponentials
    of a page: 64 rows x 64 keys for 128 threads, and one for each thread's two rows."""
    waits = re.split(r"wgmma\.wait_group\.sync\.aligned ([01]);", kernel.asm["ptx"])
    pairs = list(zip(waits[1::2], waits[2::2], strict=True))
    after_scores = [code.count("ex2.approx") for wait, code in pairs if wait == "1"]
    assert after_scores == [34] * 4  # two warpgroups, with and without the mask
