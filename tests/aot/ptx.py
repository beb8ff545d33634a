"""A Triton or Gluon kernel compiled for an H100, and what ptxas says of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxserve_kernels import ptxas

pytest.importorskip("triton", reason="Triton is not installed")
if not ptxas.available():
    pytest.skip("CUDA's ptxas is not installed", allow_module_level=True)

MOST_SHARED_MEMORY = 232_448
"""Bytes that a program may have on an H100."""


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    num_warps: int = 4,
    registers: int | None = None,
) -> Any:
    """Arguments whose names end in _ptr, and pointers of which the type is given, are aligned to 16
    bytes; others without a type are int32 pointers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    from jaxserve_kernels.triton_compat import compiler_options

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32") for name in names
    }
    aligned = [name for name in names if name.endswith("_ptr") or types.get(name, "")[:1] == "*"]
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, **compiler_options(90), "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tma_blocks(*shape: int, dtype: str = "bf16", bits: int = 16, swizzle: int = 128) -> str:
    """The type of a tensor that a kernel copies blocks of that shape of by TMA."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape)
    )
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def ptxas_report(kernel: Any, folder: Path) -> str:
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    command = [str(ptxas.path()), "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return result.stderr


def disassembled(folder: Path) -> str:
    """The machine code of the folder's kernel.cubin."""
    import triton

    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    command = [nvdisasm, "-c", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten(code: str) -> list[str]:
    """Instructions that write a register of a warpgroup's product while it runs, in the order of
    the machine code, and in one more turn of each loop into which a product runs on. The compiler
    does not prevent the latter."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for label, instruction in re.findall(r"(\.L_x_\d+):|\*/\s+(?:@!?U?P\w+ +)?([^;]+?)\s*;", code):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(instruction)
    found, running = [], list[set[int]]([set()])
    for index, instruction in enumerate(lines):
        found += _one(instruction, running)
        branch = re.match(r"BRA.*(\.L_x_\d+)", instruction)
        if branch and any(running):
            again = [set(group) for group in running]
            for each in lines[labels.get(branch[1], index) : index]:
                found += _one(each, again)
    return found


def _one(instruction: str, running: list[set[int]]) -> list[str]:
    """The instruction, if it writes a register of a running product. `running` has those of each
    group of products that is waited for together; the last group is not complete."""
    name = instruction.split()[0]
    if product := re.match(r"[HQI]GMMA\.64x(\d+)x\S* R(\d+), (?:R(\d+))?", instruction):
        width, sums, left = (int(each or -1) for each in product.groups())
        in_pairs = re.match(r"\wGMMA\.\w+\.F16\.", instruction)  # two sums of float16 in each
        running[-1] |= {sums + index for index in range(width // (4 if in_pairs else 2))}
        running[-1] |= {left + index for index in range(4) if left >= 0}
        if "gsb0" in instruction:
            running.append(set())
    elif waited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", instruction):
        del running[: max(0, len(running) - 1 - int(waited[1], 16))]
    elif written := re.match(rf"{re.escape(name)} (?:P\d, )?R(\d+)", instruction):
        size = next((each for each in (128, 64) if f".{each}" in name), 32) // 32
        size = 2 if name.startswith("CS2R") else size
        own = set(range(int(written[1]), int(written[1]) + size))
        if not name.startswith(_READERS) and any(own & group for group in running):
            return [instruction]
    return []


_READERS = ("ST", "RED", "ATOM", "R2UR", "ARRIVES", "SYNCS", "BAR", "BRA", "UTMA")
"""Begins of names of instructions whose first register is not their result."""


def check_registers_and_memory(kernel: Any, folder: Path, *, spilled: int = 0) -> None:
    """No more bytes leave the registers than `spilled`, no product waits for another (ptxas warns
    of it: C7510), none of its registers is overwritten while it runs, and the program fits a
    multiprocessor."""
    report = ptxas_report(kernel, folder)
    stores = re.findall(r"(\d+) bytes spill stores", report)
    assert stores and max(map(int, stores)) <= spilled, report
    assert "wgmma" not in report, report
    assert not overwritten(disassembled(folder))
    assert kernel.metadata.shared <= MOST_SHARED_MEMORY
