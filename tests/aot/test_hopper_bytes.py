"""Products of many tokens with fp8 weights, as ptxas makes them for an H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aot.ptx import MOST_SHARED_MEMORY, check_registers_and_memory, compile_kernel, tma_blocks


@pytest.mark.parametrize(
    ("tokens", "out", "k", "rows", "gated", "splits", "dtype"),
    [
        (2048, 19_456, 2560, 256, True, 1, "bf16"),
        (2048, 2560, 9728, 256, False, 1, "bf16"),
        (256, 2560, 9728, 128, False, 3, "fp32"),
        (200, 65_536, 640, 256, False, 1, "fp32"),  # an output matrix
    ],
)
def test_the_program_fits_and_its_products_do_not_wait(
    tokens: int, out: int, k: int, rows: int, gated: bool, splits: int, dtype: str, tmp_path: Path
) -> None:
    from jaxserve_kernels.dense_matmul.hopper import divide
    from jaxserve_kernels.quantized_matmul.e4m3.hopper_bytes import _product

    tiles = -(-tokens // 128) * (out // rows) * splits
    _, pieces = divide(tiles, 132, 2)
    types = {
        "x": tma_blocks(128, 128, dtype="fp8e4nv", bits=8), "w": tma_blocks(64, 64, dtype="u16"),
        "token_scale_ptr": "*fp32", "scale_ptr": "*fp32", "out_ptr": f"*{dtype}",
        "tokens": "i32", "tiles": "i32", "whole": "i32",
    }  # fmt: skip
    constants = {
        "pieces": pieces, "ROWS": rows, "GATED": gated,
        "SPLITS": splits, "STAGES": 4 if rows == 256 else 6,
        "n": out // 2 if gated else out, "k": k,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants)
    if out < 65_536:
        check_registers_and_memory(kernel, tmp_path)
    assert kernel.metadata.shared <= MOST_SHARED_MEMORY
    assert kernel.metadata.num_warps == 12  # two warpgroups, and one for the producer's warp
    assert "k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
