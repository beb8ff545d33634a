"""The state carried from block to block on Hopper, as ptxas makes it for an H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aot.ptx import check_registers_and_memory, compile_kernel, tma_blocks


@pytest.mark.parametrize("value_heads", [48, 32], ids=["27b", "35b_a3b"])
def test_the_program_fits_and_its_products_do_not_wait(value_heads: int, tmp_path: Path) -> None:
    from jaxserve_kernels.gated_delta_rule.hopper_blocks import _advance

    types = {
        "of_keys": tma_blocks(64, 128), "of_values": tma_blocks(64, 64),
        "solved": tma_blocks(128, 64), "scores": tma_blocks(64, 64),
        "factors_ptr": "*fp32", "state_ptr": "*fp32", "out_ptr": "*bf16",
        "layer": "i32", "slots": "i32",
    }  # fmt: skip
    constants = {
        "key_heads": 16,
        "value_heads": value_heads,
        "KEY": 128,
        "VALUE": 128,
        "CHUNKS": 16,
    }
    kernel = compile_kernel(_advance, types, constants)
    # Numbers of a chunk and of a block, and addresses.
    check_registers_and_memory(kernel, tmp_path, spilled=64)
    assert kernel.metadata.num_warps == 8  # a warpgroup, and one for the producer's warp
