"""Counts the instructions of products with quantised weights, compiled for an H100 without a GPU.

    .venv-compiler/bin/python scripts/inspect_products.py --formats int4,nvfp4

For each format and method, prints the innermost loop of the program for Qwen3-4B's gate and up: its
instructions by name, and their number for each weight that a thread handles. Counts are not times,
but a program cannot be faster than its warps can issue instructions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxserve_kernels.quantized_matmul import triton as unpack
from jaxserve_kernels.quantized_matmul import triton_arguments as arguments
from jaxserve_kernels.quantized_matmul.e4m3 import triton as e4m3

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
THREADS, ROWS, COLUMNS, DEPTH = 128, 64, 9728, 2560
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"KIND": arguments.INT4.value, "GROUP": 128, "ZERO": arguments.NO_ZERO.value},
    "int4-zeros": {"KIND": arguments.INT4.value, "GROUP": 128, "ZERO": arguments.ZERO.value},
    "nvfp4": {"KIND": arguments.NVFP4.value, "GROUP": 16, "ZERO": 0},
    "mxfp4": {"KIND": arguments.MXFP4.value, "GROUP": 32, "ZERO": 0},
    "fp8": {"KIND": arguments.FP8.value, "GROUP": DEPTH, "ZERO": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the instructions of quantised products")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    for name in parser.parse_args().formats:
        tile = 64 if name == "nvfp4" else 128
        few = {"TOKENS": 16, "UNROLL": 128 // tile, "STAGES": 4, "GATED": 1}
        report(name, "unpack, 16 tokens", compiled(unpack._gated, name, few), 128)
        if name != "fp8":
            tokens = 64 if name.startswith("int4") else 128
            many = {"TOKENS": tokens, "GATED": 1, "SPLITS": 1, "STAGES": 4}
            report(name, f"e4m3, {tokens} tokens", compiled(e4m3._product, name, many), tile)


def compiled(kernel: Any, name: str, launch: dict[str, Any]) -> Any:
    constants = {"n": COLUMNS, "k": DEPTH, "ROWS": ROWS, **FORMATS[name], **launch}
    if "EARLY" in kernel.arg_names:
        constants["EARLY"] = False
    bits = name in ("nvfp4", "mxfp4")
    types = {
        "x_ptr": "*fp8e4nv" if kernel is e4m3._product else "*bf16",
        "packed_ptr": "*u16",
        "scale_ptr": "*u32" if bits else "*fp32",
        "second_ptr": "*i32" if name == "int4-zeros" else "*fp32",
        "out_ptr": "*bf16",
        "tokens": "i32",
        "padded": "i32",
    }
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {each: "constexpr" if each in constants else types.get(each, "*fp32") for each in names},
        {(names.index(each),): value for each, value in constants.items()},
        {
            (names.index(each),): [["tt.divisibility", 16]]
            for each in names
            if each.endswith("_ptr")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def report(name: str, method: str, kernel: Any, depth: int) -> None:
    """Prints the counts. `depth`: inputs per iteration of the loop."""
    loop = max(loops(disassembled(kernel)), key=len)
    weights = ROWS * depth / THREADS
    counts = Counter(instruction.partition(".")[0] for instruction in loop)
    often = ", ".join(f"{opcode} {count}" for opcode, count in counts.most_common(12))
    per_weight = len(loop) / weights
    print(f"{name}, {method}: {len(loop)} instructions, {per_weight:.2f} per weight: {often}")


def disassembled(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [NVDISASM, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[list[str]]:
    """Opcodes between a label and a branch back to it."""
    found: list[list[str]] = []
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*?);"
        if instruction := re.search(pattern, line):
            opcodes.append(instruction[1])
            goal = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1].startswith("BRA") and goal and goal[0] in labels:
                found.append(opcodes[labels[goal[0]] :])
    return [loop for loop in found if len(loop) > 1]


if __name__ == "__main__":
    main()
