"""The attention kernel for Hopper, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.aot.ptx import check_registers_and_memory, compile_kernel, tma_blocks


class Compiled(NamedTuple):
    kernel: Any
    keys: int
    """Keys in a block."""


@pytest.fixture(
    scope="module",
    params=[(1, 128), (8, 128), (1, 256), (8, 256)],
    ids=["whole", "split", "large heads", "large heads, split"],
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """For Qwen3-4B's heads, and for those of Qwen3.5-35B-A3B."""
    from jaxserve_kernels.paged_attention.hopper import _program

    splits, dim = request.param
    heads = (
        {"q_heads": 32, "kv_heads": 8, "TOKENS": 16, "DIM": 128, "KEYS": 64}
        if dim == 128
        else {"q_heads": 16, "kv_heads": 2, "TOKENS": 8, "DIM": 256, "KEYS": 32}
    )
    constants: dict[str, Any] = {
        "scale": 0.1, **heads, "ROWS": 128, "PAGE": 64, "SPLITS": splits, "MIN_BLOCKS": 8,
        "STAGES": 4, "TILES": 312, "WINDOW": 0, "sinks_ptr": None,
    }  # fmt: skip
    types = {
        "q_ptr": "*bf16",
        "kv": tma_blocks(heads["KEYS"], dim),
        "first_page": "i32",
        "out_ptr": "*bf16",
        "part_ptr": "*fp32",
        "peak_ptr": "*fp32",
        "weight_ptr": "*fp32",
        "table_stride": "i32",
    }
    return Compiled(compile_kernel(_program, types, constants), heads["KEYS"])


def test_the_program_fits_and_its_products_do_not_wait(compiled: Compiled, tmp_path: Path) -> None:
    """ptxas 13.5 keeps an address or two in memory, 13.0 none. With large heads, sums of splits
    leave by more addresses than fit beside them."""
    spilled = 12 if compiled.keys == 64 else 52
    check_registers_and_memory(compiled.kernel, tmp_path, spilled=spilled)


def test_consumers_get_the_registers_that_the_producer_gives_up(compiled: Compiled) -> None:
    given = re.findall(
        r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", compiled.kernel.asm["ptx"]
    )
    assert ("inc", "240") in given and ("dec", "24") in given
    assert compiled.kernel.metadata.num_warps == 12


def test_the_softmax_runs_under_the_product_of_the_page_before(compiled: Compiled) -> None:
    """Between the waits for this block's scores and for the last block's values are the
    exponentials of a block: 64 rows x its keys for 128 threads, and one for each thread's two
    rows."""
    waits = re.split(r"wgmma\.wait_group\.sync\.aligned ([01]);", compiled.kernel.asm["ptx"])
    pairs = list(zip(waits[1::2], waits[2::2], strict=True))
    after_scores = [code.count("ex2.approx") for wait, code in pairs if wait == "1"]
    expected = compiled.keys // 2 + 2
    assert after_scores == [expected] * 4  # two warpgroups, with and without the mask
