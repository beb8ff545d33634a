"""Products of many tokens with their experts, as ptxas makes them for an H100."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.aot.ptx import (
    check_registers_and_memory,
    compile_kernel,
    disassembled,
    ptxas_report,
    tma_blocks,
)

KINDS = {"bf16": -2, "int8": 0, "fp8": 1, "int4": 2, "mxfp4": 4}
QWEN, GPT_OSS = (2048, 768), (2880, 2880)
"""Embed and width of Qwen3-30B-A3B and gpt-oss-20b."""


def compiled(
    name: str, sizes: tuple[int, int], *, gated: bool, zeros: bool = False, small: bool = False
) -> Any:
    """small: with few tokens for each expert."""
    from jaxserve_kernels.experts import hopper
    from jaxserve_kernels.experts.hopper_copy import DEPTH, PANEL
    from jaxserve_kernels.experts.hopper_lists import BOX
    from jaxserve_kernels.quantized_matmul.e4m3.tokens import SUMS

    embed, width = sizes
    n, k = (width, embed) if gated else (embed, width)
    rows = 2 * n if gated else n
    in_bytes = name.startswith(("fp8", "int4", "mxfp4"))
    words = 32 if name in ("int4", "mxfp4") else 64
    plain = name == "bf16"
    oss = sizes == GPT_OSS
    padded = k if plain else k + -k % 128
    scales = "*fp32"
    tile = hopper.SMALL if small else hopper.SCALING
    if name in ("bf16", "fp8"):
        tile = hopper.MULTIPLYING
    elif name == "int8":
        tile = hopper.CONVERTING
    size = tile.parts * tile.own
    box = (1, 8, 2, 8) if gated else (1, size // 64, 1, 64)
    of_rows = (1, size // 16, 2, 8) if gated else (1, size)
    if name in ("int4", "mxfp4", "fp8-blocks"):
        dtype = "u32" if name == "mxfp4" else "fp32"
        of_scales = (1, size // 128, 8, 2, 8) if gated else (1, size // 64, 64)
        scales = tma_blocks(*of_scales, dtype=dtype, bits=32, swizzle=0)
    if gated:
        tokens = "*fp8e4nv" if in_bytes else "*bf16"
    elif in_bytes:
        tokens = tma_blocks(BOX, PANEL, dtype="fp8e4nv", bits=8)
    else:
        tokens = tma_blocks(BOX, DEPTH)
    types = {
        "x": tokens,
        "w": tma_blocks(*of_rows, DEPTH)
        if plain
        else tma_blocks(*box, words, dtype="u16", swizzle=2 * words),
        "scales": scales, "scale_ptr": "*u32" if name == "mxfp4" else "*fp32",
        "zero_ptr": "*u8" if name == "mxfp4" else "*i32",
        "bias_ptr": "*bf16", "weights_ptr": "*fp32", "token_scale_ptr": "*fp32",
        "tokens": "i32", "out_ptr": "*bf16",
    }  # fmt: skip
    inputs = k
    if in_bytes:
        inputs = padded + (2 * SUMS if name == "int4" else 0)
    constants = {
        "count": 229, "columns": -(-n // (size // 2 if gated else size)),
        "rows": rows, "all_rows": 128 * rows, "n": n,
        "inputs": inputs, "k": padded, "choices": 8, "BIAS": oss,
        "STAGES": 4 if plain or in_bytes else 3,
        "GATED": (3 if oss else 1) if gated else 0, "KIND": KINDS[name.removesuffix("-blocks")],
        "GROUP": 128 if name in ("int4", "fp8-blocks") else padded, "ZERO": int(zeros),
        "UNPACK": None, "PARTS": tile.parts, "OWN": tile.own,
        "MOST": hopper.MOST_SMALL if small else hopper.MOST,
    }  # fmt: skip
    warps = 8 // tile.parts
    return compile_kernel(
        hopper._program, types, constants, num_warps=warps, registers=tile.registers
    )


@pytest.mark.parametrize(("name", "sizes", "gated", "spilled"), [
    ("bf16", QWEN, True, 8), ("bf16", QWEN, False, 0), ("bf16", GPT_OSS, True, 16),
    ("int4", QWEN, True, 16), ("int4", QWEN, False, 0), ("int8", QWEN, False, 32),
    ("mxfp4", GPT_OSS, True, 44), ("mxfp4", GPT_OSS, False, 32),
    ("fp8", QWEN, True, 8), ("fp8", QWEN, False, 0),
    ("fp8-blocks", QWEN, True, 24), ("fp8-blocks", QWEN, False, 0),
])  # fmt: skip
def test_the_program_fits_and_its_products_do_not_wait(
    name: str, sizes: tuple[int, int], gated: bool, spilled: int, tmp_path: Path
) -> None:
    """What little leaves registers does so where a tile begins, or where it has 160 tokens."""
    kernel = compiled(name, sizes, gated=gated)
    check_registers_and_memory(kernel, tmp_path, spilled=spilled)
    assert kernel.metadata.num_warps == 12  # two warpgroups, and one for the producer's warps


@pytest.mark.parametrize(("name", "sizes"), [("int4", QWEN), ("mxfp4", GPT_OSS)])
@pytest.mark.parametrize("gated", [True, False])
def test_two_programs_of_small_tiles_fit_on_a_multiprocessor(
    name: str, sizes: tuple[int, int], gated: bool, tmp_path: Path
) -> None:
    from jaxserve_kernels.experts import hopper

    kernel = compiled(name, sizes, gated=gated, small=True)
    assert hopper.SMALL.registers is not None
    check_registers_and_memory(kernel, tmp_path, spilled=8)
    assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert 2 * 32 * kernel.metadata.num_warps * hopper.SMALL.registers <= 65536


def step_of(kernel: Any, tmp_path: Path) -> str:
    """The machine code of a step of the smallest tile."""
    ptxas_report(kernel, tmp_path)
    code = disassembled(tmp_path)
    loops = re.findall(r"\n\.(L_x_\d+):(?=(.*?)BRA `\(\.\1\))", code, re.DOTALL)
    return min((body for _, body in loops if "QGMMA" in body), key=len)


@pytest.mark.parametrize("gated", [True, False])
def test_eight_codes_of_mxfp4_take_nine_instructions(gated: bool, tmp_path: Path) -> None:
    """A step of 64 rows: a thread has two rows, a block of each. Of nine instructions two shift."""
    step = step_of(compiled("mxfp4", GPT_OSS, gated=gated, small=True), tmp_path)
    found = [len(re.findall(name, step)) for name in ("LDS.128", "LDS.U8", "PRMT", r"\bLOP3")]
    assert found == [2, 2, 8 * 4, 8 * 3]


@pytest.mark.parametrize("gated", [True, False])
def test_two_sums_of_int4_are_scaled_in_one_instruction(gated: bool, tmp_path: Path) -> None:
    """A step of 64 rows and 64 tokens: a thread has two rows, and 32 sums. Only codes are
    permuted."""
    step = step_of(compiled("int4", QWEN, gated=gated, small=True), tmp_path)
    names = ("HFMA2", r"\bFMUL", "F2F", "HADD2", "PRMT")
    assert [len(re.findall(name, step)) for name in names] == [16, 2, 2, 0, 8]


@pytest.mark.parametrize(("name", "most"), [("int4", 13), ("fp8-blocks", 11), ("bf16", 9)])
def test_warps_that_gather_seldom_wait_for_each_other(name: str, most: int) -> None:
    """In a step: where it begins and ends, and once for each copy of weights or scales; twice more
    in int4's step of tokens' sums. The other six are where a tile begins and ends."""
    kernel = compiled(name, QWEN, gated=True)
    barrier = 2 if name == "bf16" else 3  # of the partition after the parts that multiply
    found = re.findall(rf"bar\.sync\s+{barrier},", kernel.asm["ptx"])
    assert 0 < len(found) <= most


@pytest.mark.parametrize("name", ["int4", "mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize("gated", [True, False])
def test_warps_seldom_wait_for_each_other_where_a_tile_ends(name: str, gated: bool) -> None:
    """Results change their layout in a buffer of a part's own: two waits for 32 or 64 tokens. In
    scratch memory it took four times as many. Each part has four variants of a tile."""
    kernel = compiled(name, GPT_OSS if name == "mxfp4" else QWEN, gated=gated)
    assert len(re.findall(r"bar\.sync", kernel.asm["ptx"])) <= 150
