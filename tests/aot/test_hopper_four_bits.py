"""Products of many tokens with weights of 4 bits, as ptxas makes them for an H100."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import check_registers_and_memory, compile_kernel, tma_blocks

KINDS = {"int4": 2, "nvfp4": 3, "mxfp4": 4}


def compiled(name: str, tokens: int, stages: int, *, gated: bool) -> Any:
    """Gate and up of Qwen3-4B for 256 tokens, whose tiles programs share, or thirds of down's
    inputs."""
    from jaxserve_kernels.quantized_matmul.e4m3.hopper import _product

    rows, words = (128, 16) if name == "nvfp4" else (64, 32)
    n, k, splits = (9728, 2560, 1) if gated else (2560, 9728, 3)
    types = {
        "x": tma_blocks(tokens, 128, dtype="fp8e4nv", bits=8),
        "packed": tma_blocks(rows, words, dtype="u16", swizzle=2 * words),
        "token_scale_ptr": "*fp32", "sum_ptr": "*fp32",
        "second_ptr": "*u8" if name == "mxfp4" else "*fp32",
        "scale_ptr": "*fp32" if name == "int4" else "*u32",
        "out_ptr": "*bf16" if gated else "*fp32", "partial_ptr": "*fp32",
    }  # fmt: skip
    constants = {
        "tokens": 256, "padded": 256, "n": n, "k": k, "GATED": gated, "KIND": KINDS[name],
        "GROUP": 128, "ZERO": 0, "TOKENS": tokens, "SPLITS": splits,
        "STEPS": -(-(k // 128) // splits), "STAGES": stages, "SHARED": gated,
    }  # fmt: skip
    return compile_kernel(_product, types, constants)


@pytest.mark.parametrize(
    ("name", "tokens", "stages", "gated"),
    [("nvfp4", 256, 4, True), ("mxfp4", 128, 6, False), ("int4", 256, 4, True)],
)
def test_the_program_fits_and_its_products_do_not_wait(
    name: str, tokens: int, stages: int, gated: bool, tmp_path: Path
) -> None:
    """Codes become e4m3 in the registers that the tensor cores read: no layout is changed, of
    which the kernel's own assertions would tell."""
    kernel = compiled(name, tokens, stages, gated=gated)
    check_registers_and_memory(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12  # two warpgroups, and one for the producer's warp
