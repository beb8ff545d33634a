"""The attention kernel for Hopper, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import check_registers_and_memory, compile_kernel, tma_blocks


@pytest.fixture(scope="module", params=[1, 8], ids=["whole", "split"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """For Qwen3-4B's heads."""
    from jaxserve_kernels.paged_attention.hopper import _program

    constants: dict[str, Any] = {
        "scale": 0.1, "q_heads": 32, "kv_heads": 8, "TOKENS": 16, "ROWS": 128, "DIM": 128,
        "PAGE": 64, "SPLITS": request.param, "MIN_PAGES": 8, "STAGES": 4, "TILES": 312, "WINDOW": 0,
        "sinks_ptr": None,
    }  # fmt: skip
    types = {
        "q_ptr": "*bf16",
        "kv": tma_blocks(64, 128),
        "first_page": "i32",
        "out_ptr": "*bf16",
        "part_ptr": "*fp32",
        "peak_ptr": "*fp32",
        "weight_ptr": "*fp32",
        "table_stride": "i32",
    }
    return compile_kernel(_program, types, constants)


def test_the_program_fits_and_its_products_do_not_wait(kernel: Any, tmp_path: Path) -> None:
    """ptxas 13.5 keeps an address or two in memory, 13.0 none."""
    check_registers_and_memory(kernel, tmp_path, spilled=12)


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
