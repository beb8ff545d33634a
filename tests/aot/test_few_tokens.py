"""Products of up to 64 tokens, as ptxas makes them: what their speed rests on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve_kernels.target import Target
from tests.aot.ptx import (
    MOST_SHARED_MEMORY,
    check_registers_and_memory,
    compile_kernel,
    disassembled,
    ptxas_report,
)

STEPS = 5


def compiled(tokens: int, group: int) -> Any:
    """Gate and up of Qwen3-4B, as the dispatch launches them."""
    from jaxserve_kernels.quantized_matmul.triton_small_m import _product

    types = {
        "x_ptr": "*bf16", "packed_ptr": "*u16", "scale_ptr": "*fp32", "zero_ptr": "*fp32",
        "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "tokens": tokens, "n": 9728, "k": 2560, "GATED": 1, "KIND": 2, "GROUP": group, "ZERO": 0,
        "TOKENS": 8, "ROWS": 16, "STEPS": STEPS, "WARPS": 4,
    }  # fmt: skip
    return compile_kernel(_product, types, constants)


@pytest.mark.parametrize(("tokens", "group"), [(1, 128), (8, 64)])
def test_all_codes_are_asked_for_before_the_first_is_used(
    tokens: int, group: int, tmp_path: Path
) -> None:
    """A thread's codes of a tile are 16 bytes of each of two rows."""
    kernel = compiled(tokens, group)
    report = ptxas_report(kernel, tmp_path)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert registers and int(registers[1]) <= 128  # four programs for each multiprocessor
    before, _ = disassembled(tmp_path).split("HMMA.16816", 1)
    assert len(re.findall(r"LDG\.E\.128", before)) >= 2 * STEPS


@pytest.mark.parametrize(
    ("tokens", "k_tiles", "stages"), [(8, 2, 5), (16, 2, 4), (32, 1, 5), (64, 1, 3)]
)
def test_a_ring_of_codes_is_asked_for_before_the_kernels_before_end(
    tokens: int, k_tiles: int, stages: int, tmp_path: Path
) -> None:
    """With PDL. Three programs share a multiprocessor, and their products do not wait for each
    other; a k_tiles has two barriers, each of which costs as much as ten instructions."""
    from jaxserve_kernels.quantized_matmul.triton_streaming import _product

    types = {
        "x_ptr": "*bf16", "packed_ptr": "*u16", "scale_ptr": "*fp32", "second_ptr": "*i32",
        "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "tokens": tokens, "n": 9728, "k": 2560, "GATED": 1, "KIND": 2, "GROUP": 64, "ZERO": 1,
        "TOKENS": tokens, "ROWS": 64, "STEPS": 20, "K_TILES": k_tiles, "STAGES": stages,
        "FIRST": False, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants)
    check_registers_and_memory(kernel, tmp_path)
    assert 3 * kernel.metadata.shared <= MOST_SHARED_MEMORY
    before, after = disassembled(tmp_path).split("ACQBULK", 1)
    assert len(re.findall(r"LDGSTS\.E\S*\.128", before)) == 2 * k_tiles * (stages - 1)
    loop = re.search(r"\n\.(L_x_\d+):(.*?)BRA `\(\.\1\)", after, re.DOTALL)
    assert loop and len(re.findall(r"BAR\.SYNC", loop[2])) == 2


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["fp8", "int8", "nvfp4", "mxfp4"])
def test_rings_of_every_format_fit_three_programs(name: str, tokens: int, tmp_path: Path) -> None:
    """As the dispatch launches gate and up of Qwen3-4B with PDL."""
    import jax
    import jax.numpy as jnp

    from jaxserve_kernels import weights
    from jaxserve_kernels.quantized_matmul.config import steps
    from jaxserve_kernels.quantized_matmul.rules import choose
    from jaxserve_kernels.quantized_matmul.triton_arguments import kind
    from jaxserve_kernels.quantized_matmul.triton_streaming import _product

    plain = jax.ShapeDtypeStruct((19_456, 2560), jnp.bfloat16)
    weight = jax.eval_shape(getattr(weights, f"quantize_{name}"), plain)
    pdl = Target.for_gpu(90).replace(pdl=True)
    config = choose(weight, tokens, gated=True, hopper=True, target=pdl)
    assert config is not None and config.method == "streaming"
    types = {
        "x_ptr": "*bf16", "packed_ptr": "*u16", "scale_ptr": "*u32" if "fp4" in name else "*fp32",
        "second_ptr": "*fp32", "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "tokens": tokens, "n": 9728, "k": 2560, "GATED": 1, **kind(weight),
        "TOKENS": config.tokens, "ROWS": config.rows, "STEPS": steps(20, 1, config.unroll),
        "K_TILES": config.unroll, "STAGES": config.num_stages, "FIRST": config.first, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants)
    check_registers_and_memory(kernel, tmp_path)
    assert 3 * kernel.metadata.shared <= MOST_SHARED_MEMORY
    before, _ = disassembled(tmp_path).split("ACQBULK", 1)
    k_tiles = config.unroll * (4 if name in ("fp8", "int8") else 2)  # of 16 bytes for each thread
    assert len(re.findall(r"LDGSTS\.E\S*\.128", before)) == k_tiles * (config.num_stages - 1)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "k_tiles", "stages", "programs"), [(16, 2, 3, 5), (32, 2, 4, 3), (64, 1, 5, 3)]
)
def test_int8_tokens_leave_fewer_instructions(
    tokens: int, k_tiles: int, stages: int, programs: int, zero: int, tmp_path: Path
) -> None:
    """Eight codes take three instructions, and tensor cores multiply integers."""
    from jaxserve_kernels.quantized_matmul.triton_streaming import _product

    types = {
        "x_ptr": "*i8", "factor_ptr": "*fp32", "sum_ptr": "*fp32", "packed_ptr": "*u16",
        "scale_ptr": "*fp32", "second_ptr": "*i32", "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "tokens": tokens, "n": 17_408, "k": 5120, "GATED": 1, "KIND": 2, "GROUP": 128, "ZERO": zero,
        "TOKENS": tokens, "ROWS": 64, "STEPS": 40, "K_TILES": k_tiles, "STAGES": stages,
        "FIRST": False, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants)
    check_registers_and_memory(kernel, tmp_path)
    assert programs * kernel.metadata.shared <= MOST_SHARED_MEMORY
    code = disassembled(tmp_path)
    assert len(re.findall(r"IMMA|IGMMA", code)) == k_tiles * (8 if tokens == 16 else 4)
    assert not re.search(r"HFMA2|HMMA|HGMMA", code.split("ACQBULK", 1)[1].split("EXIT", 1)[0])


@pytest.mark.parametrize("half", [20, 22])
def test_half_a_tile_of_a_last_wave_takes_no_more_than_a_whole_one(
    half: int, tmp_path: Path
) -> None:
    """Gate and up of Qwen3.6-27B. Both kinds of programs fill the same ring before they wait."""
    from jaxserve_kernels.quantized_matmul.triton_streaming import _product_in_halves

    types = {
        "x_ptr": "*i8", "factor_ptr": "*fp32", "packed_ptr": "*u16", "scale_ptr": "*fp32",
        "second_ptr": "*fp32", "out_ptr": "*bf16", "partial_ptr": "*fp32", "ended_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "tokens": 32, "n": 17_408, "k": 5120, "GATED": 1, "KIND": 2, "GROUP": 128, "ZERO": 0,
        "TOKENS": 32, "ROWS": 64, "HALF": half, "HALVED": 148, "K_TILES": 2, "STAGES": 4,
        "FIRST": False, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_product_in_halves, types, constants)
    check_registers_and_memory(kernel, tmp_path)
    assert 3 * kernel.metadata.shared <= MOST_SHARED_MEMORY
    whole, halves, _ = disassembled(tmp_path).split("ACQBULK")
    halves = halves.rsplit("EXIT", 1)[1]
    for before in (whole, halves):
        assert len(re.findall(r"LDGSTS\.E\S*\.128", before)) == 2 * 2 * (4 - 1)


@pytest.mark.parametrize(("dtype", "stages"), [("*bf16", 7), ("*i8", 9)])
@pytest.mark.parametrize("each", [16, 20])
def test_warpgroups_that_share_tokens_fit_a_multiprocessor(
    each: int, dtype: str, stages: int, tmp_path: Path
) -> None:
    """Three that multiply and one that copies, with the registers that each needs. Of 20 k-steps of
    a tile, programs have 16, or all."""
    from jaxserve_kernels.quantized_matmul.triton_stream_k import _product

    types = {
        "x_ptr": dtype, "factor_ptr": "*fp32", "packed_ptr": "*u16", "scale_ptr": "*fp32",
        "zero_ptr": "*fp32", "out_ptr": "*bf16", "partial_ptr": "*fp32", "flag_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "tokens": 64, "n": 9728, "k": 2560, "KIND": 2, "GROUP": 128, "ZERO": 0, "TOKENS": 64,
        "STAGES": stages, "EACH": each, "GATED": 1, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants)
    check_registers_and_memory(kernel, tmp_path)


@pytest.mark.parametrize("tokens", [32, 64])
def test_blocks_of_the_output_matrix_are_multiplied_side_by_side(
    tokens: int, tmp_path: Path
) -> None:
    """A k-step's 48 KB of codes are twelve copies of each thread, of which two steps are under
    way; no product waits for another block's codes."""
    from jaxserve_kernels.quantized_matmul.triton_large_n import _product

    types = {"x_ptr": "*bf16", "packed_ptr": "*u16", "scale_ptr": "*fp32", "out_ptr": "*fp32"}
    constants = {
        "tokens": tokens, "n": 151_936, "k": 2560, "TOKENS": tokens, "BLOCKS": 3, "STAGES": 3,
    }  # fmt: skip
    kernel = compile_kernel(_product, types, constants, num_warps=8)
    check_registers_and_memory(kernel, tmp_path)
    before, _ = disassembled(tmp_path).split("HGMMA", 1)
    assert len(re.findall(r"LDGSTS\.E\S*\.128", before)) == 3 * (12 + tokens // 16)
