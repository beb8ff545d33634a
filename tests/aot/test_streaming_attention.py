"""The attention that is launched early, as ptxas makes it: what its speed rests on."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels.kv_format import attend, named
from jaxserve_kernels.target import Target
from tests.aot.ptx import compile_kernel, disassembled, ptxas_report
from tests.kernels.kv_steps import EPS, LAYER, Sequences

QWEN3 = {"q_heads": 32, "kv_heads": 8, "HALF": 64, "GATED": 0, "DIM": 128, "KEYS": 64}
QWEN3_5 = {"q_heads": 24, "kv_heads": 4, "HALF": 32, "GATED": 1, "DIM": 256, "KEYS": 32}


@pytest.mark.parametrize(
    ("heads", "qkv", "splits", "stages", "registers"),
    [
        (QWEN3, "*fp32", 8, 2, 168),  # three programs for each multiprocessor
        (QWEN3, "*bf16", 1, 3, 168),
        (QWEN3_5, "*fp32", 32, 2, 255),  # two
        (QWEN3_5, "*fp32", 1, 3, 255),
    ],
    ids=["8_splits", "1_split", "256_32_splits", "256_1_split"],
)
def test_past_keys_and_values_are_asked_for_before_the_kernels_before_it_end(
    heads: dict[str, int], qkv: str, splits: int, stages: int, registers: int, tmp_path: Path
) -> None:
    """For the heads of Qwen3-4B and of Qwen3.5 27B. A thread copies 16 bytes of eight rows of a
    block's keys, and as many of its values; ACQBULK is the wait."""
    from jaxserve_kernels.paged_attention.triton_streaming import _attend

    fp32 = ("cos", "sin", "part", "peak", "weight")
    types = {f"{name}_ptr": "*fp32" for name in fp32} | {"kv_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), "*fp32" if heads["GATED"] else "*bf16")
    constants: dict[str, Any] = heads | {
        "stride": 6144, "table_stride": 640, "parts": 4, "eps": 1e-6, "scale": 0.1, "ROWS": 16,
        "PAGE": 64, "SPLITS": splits, "MIN_BLOCKS": 1, "STAGES": stages, "WINDOW": 0,
        "EARLY": True, "bias_ptr": None, "sinks_ptr": None,
    }  # fmt: skip
    kernel = compile_kernel(_attend, types | {"qkv_ptr": qkv, "first_page": "i32"}, constants)
    assert _registers(kernel, tmp_path) <= registers
    assert kernel.metadata.shared <= 34 * 1024 * stages + 8 * 1024
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", _before_the_wait(tmp_path))) == 16 * stages


_HEADS: dict[str, Any] = {
    "q_heads": 32, "kv_heads": 8, "stride": 6144, "parts": 4, "eps": 1e-6, "scale": 0.1,
    "bias_ptr": None,
}  # fmt: skip
_TYPES = {
    "*fp32": "qkv_ptr cos_ptr sin_ptr part_ptr sums_ptr peak_ptr weight_ptr",
    "*bf16": "q_norm_ptr k_norm_ptr raw_ptr out_ptr",
    "*i16": "key_words_ptr value_words_ptr",
    "i32": "layer first_page first_slot table_stride",
}


def _types(scales: str) -> dict[str, str]:
    """Of the arguments of the quantised formats' kernels."""
    types = {name: kind for kind, names in _TYPES.items() for name in names.split()}
    return types | {"scales_ptr": scales}


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["bf16", "int8", "fp8"])
def test_so_are_they_with_a_softmax_for_each_warp(kind: int, tmp_path: Path) -> None:
    """A page is 16 KB of keys and as many of values, of 8 bits half of that, of which a thread
    copies 16 bytes at a time; int8's scales are 4 bytes for each."""
    from jaxserve_kernels.paged_attention.triton_warps import _attend

    constants = _HEADS | {
        "table_stride": 640, "ROWS": 8, "HALF": 64, "PAGE": 64, "SPLITS": 33, "MIN_BLOCKS": 1,
        "STAGES": 2, "KIND": kind, "WINDOW": 0, "EARLY": True,
    }  # fmt: skip
    types = _types("*fp32") | {"kv_ptr": "*i16" if kind else "*bf16"}
    kernel = compile_kernel(_attend, types, constants)
    assert _registers(kernel, tmp_path) <= 128  # four programs for each multiprocessor
    assert kernel.metadata.shared <= (36 if kind else 67) * 1024
    copies = re.findall(r"LDGSTS\.E\.BYPASS\.128", _before_the_wait(tmp_path))
    assert len(copies) == 2 * (8 if kind else 16)
    assert len(re.findall(r"BAR\.SYNC", disassembled(tmp_path))) <= 15


@pytest.mark.parametrize("bits", [4, 2])
def test_so_are_codes(bits: int, tmp_path: Path) -> None:
    """A thread copies 16 bytes of 16 rows of keys and values in full precision, or of four rows of
    a page's keys as codes, of four (of 2 bits: two) of its values, and of its scales."""
    from jaxserve_kernels.kv_format.kvarn.triton_streaming import _attend

    constants = _HEADS | {
        "ROWS": 8, "QUARTER": 32, "GROUP": 128, "BITS": bits, "CHUNK": 64,
        "SPLITS": 2, "MIN_UNITS": 3, "STAGES": 2, "EARLY": True,
    }  # fmt: skip
    kernel = compile_kernel(_attend, _types("*fp16"), constants)
    assert _registers(kernel, tmp_path) <= 168  # three programs for each multiprocessor
    assert kernel.metadata.shared <= 74 * 1024
    code = disassembled(tmp_path)
    copies = re.findall(r"LDGSTS\.E\.BYPASS\.128", _before_the_wait(tmp_path))
    assert len(copies) == 2 * (16 + 4 + bits + 1)
    assert len(re.findall(r"BAR\.SYNC", code)) <= 16


def _registers(kernel: Any, folder: Path) -> int:
    """Registers per thread; none may have to go through memory."""
    report = ptxas_report(kernel, folder)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report)
    found = re.search(r"Used (\d+) registers", report)
    assert found
    return int(found[1])


def _before_the_wait(folder: Path) -> str:
    """The machine code before the first ACQBULK, the wait for the kernels before, that follows a
    copy. Programs without work wait somewhere, too."""
    code = disassembled(folder)
    return code[: code.index("ACQBULK", code.index("LDGSTS"))]


@pytest.mark.parametrize(
    ("name", "capability", "converts"),
    [("int8", 80, True), ("fp8_e4m3", 80, False), ("fp8_e4m3", 89, True), ("fp8_e4m3", 90, True)],
)
def test_bytes_are_converted_by_instructions_that_the_card_has(
    name: str, capability: int, converts: bool
) -> None:
    """Else the kernel for any GPU reads them, whose name this is."""
    kv_format = named(name)
    sequences = Sequences(lengths=(40,), page_size=64, head_dim=128, dtype="bfloat16")
    kv = kv_format.allocate(sequences.shape, jnp.bfloat16)
    step = sequences.step((39,), (1,), 1)
    qkv, tables = sequences.projections(step)
    call = functools.partial(
        attend,
        layer=LAYER,
        eps=EPS,
        tile_size=1,
        dtype=sequences.dtype,  # a name, as anybody may write it
        target=Target.for_gpu(capability),
    )
    program = jax.make_jaxpr(
        lambda qkv, kv: call(qkv, kv, heads=sequences.heads, tables=tables, step=step)
    )(qkv, kv)
    assert ("paged_attention_8_bit" in str(program)) != converts
