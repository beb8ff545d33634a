"""The gated product for Hopper, as ptxas makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aot.ptx import check_registers_and_memory, compile_gluon, tma_blocks


@pytest.mark.parametrize(("tokens", "n", "k"), [(1024, 9728, 2560), (1000, 128, 64)])
def test_the_program_fits_and_its_products_do_not_wait(
    tokens: int, n: int, k: int, tmp_path: Path
) -> None:
    from jaxserve_kernels.dense_matmul.hopper import COLUMNS, DEPTH, TOKENS, _program

    types = {"x": tma_blocks(TOKENS, DEPTH), "w": tma_blocks(COLUMNS, DEPTH), "out_ptr": "*bf16"}
    kernel = compile_gluon(_program, types, {"tokens": tokens, "n": n, "k": k})
    check_registers_and_memory(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12  # two warpgroups, and one for the producer's warp
