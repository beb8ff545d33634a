"""Products with weights of 4 bits that a warpgroup converts, as ptxas makes them for an H100."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import MOST_SHARED_MEMORY, compile_kernel, ptxas_report, tma_blocks

KINDS = {"int4": 2, "int4-g64": 2, "int4-zeros": 2, "nvfp4": 3, "mxfp4": 4}


def boxes(name: str, shape: tuple[int, ...], dtype: str, bits: int, swizzle: int) -> dict[str, str]:
    """Types of what is copied of whole tiles, and of halves of them."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=4)
    halves, tiles, *rest = shape
    return {
        f"{name}{suffix}": f"tensordesc<{dtype}{[halves, tiles // cut, *rest]},{layout!r}>"
        for suffix, cut in (("", 1), ("_piece", 2))
    }


def compiled(name: str, tokens: int, *, gated: bool) -> Any:
    """Gate and up of Qwen3-4B, or its down."""
    from jaxserve_kernels.quantized_matmul.e4m3.hopper_converting import _product, choose

    out, k = (19_456, 2560) if gated else (2560, 9728)
    config = choose(tokens, out, k, gated=gated)
    groups = 2 if name in ("int4-g64", "nvfp4") else 1
    words, rows = (16, 128) if name == "nvfp4" else (32, 64)
    scale = "fp32" if name.startswith("int4") else "u32"
    halves = 2 if gated else 1
    tiles = config.rows // 64 // halves
    types = {
        "x": tma_blocks(128, 128, dtype="fp8e4nv", bits=8),
        **boxes("packed", (halves, tiles, rows, words), "u16", 16, 2 * words),
        **boxes("scale", (halves, tiles, groups, 64), scale, 32, 0),
        **boxes("zero", (halves, tiles, groups, 64), "i32" if "zeros" in name else scale, 32, 0),
        "token_scale_ptr": "*fp32", "row_scale_ptr": "*fp32",
        "out_ptr": "*bf16" if gated else "*fp32",
        "tokens": "i32", "tiles": "i32", "whole": "i32",
    }  # fmt: skip
    constants = {
        "pieces": 2, "ROWS": config.rows, "GATED": gated, "SPLITS": config.splits,
        "STAGES": config.num_stages, "AHEAD": config.unroll, "KIND": KINDS[name],
        "GROUPS": groups, "ZERO": int("zeros" in name), "n": out // halves, "k": k,
    }  # fmt: skip
    return compile_kernel(_product, types, constants)


@pytest.mark.parametrize(
    ("name", "tokens", "gated"),
    [
        ("int4", 2048, True),
        ("int4-zeros", 256, False),
        ("int4-g64", 256, False),
        ("nvfp4", 512, True),
        ("mxfp4", 128, False),
    ],
)
def test_the_program_fits_and_moves_whole_vectors(
    name: str, tokens: int, gated: bool, tmp_path: Path
) -> None:
    """Sixteen bytes of codes, and of e4m3, at once; hardly a register leaves its place."""
    kernel = compiled(name, tokens, gated=gated)
    report = ptxas_report(kernel, tmp_path)
    assert "wgmma" not in report, report
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    assert int(spilled) <= 32
    assert kernel.metadata.shared <= MOST_SHARED_MEMORY
    assert kernel.metadata.num_warps == 12
    ptx = kernel.asm["ptx"]
    assert "k32.f32.e4m3.e4m3" in ptx
    assert "ld.shared.v4.b32" in ptx and "st.shared.v4.b32" in ptx
