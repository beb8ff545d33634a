"""The inline assembly of the kernels, computed on a CPU: what the instructions say, bit for bit.

Only the instructions that occur. Semantics are those of NVIDIA's "Parallel Thread Execution ISA".
The kernels' sources are read as text, so that neither Triton nor a GPU is needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

type Words = NDArray[np.uint32]

KERNELS = Path(__file__).parents[2] / "kernels/jaxserve_kernels"


def assembly(file: str, function: str) -> Callable[..., tuple[Words, ...]]:
    """The assembly of a function in one of the kernels' files: from its inputs to its outputs."""
    tree = ast.parse((KERNELS / file).read_text())
    (found,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    (call,) = [
        node
        for node in ast.walk(found)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("inline_asm_elementwise")
    ]
    code, constraints = (ast.literal_eval(argument) for argument in call.args[:2])
    outputs = sum(each.startswith("=") for each in constraints.split(","))

    return lambda *inputs: run_assembly(code, outputs, inputs)


def run_assembly(code: str, outputs: int, inputs: Sequence[Words]) -> tuple[Words, ...]:
    """What so many outputs hold in the end."""
    registers: dict[str, Any] = {
        f"${outputs + index}": np.asarray(each, np.uint32) for index, each in enumerate(inputs)
    }
    for line in code.strip().removeprefix("{").removesuffix("}").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            _execute(line.strip(), registers)
    return tuple(registers[f"${index}"] for index in range(outputs))


def _execute(line: str, registers: dict[str, Any]) -> None:
    name, _, rest = line.partition(" ")
    target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)

    def value(text: str) -> Any:
        if text.startswith("{"):
            low, high = (registers[part.strip()] for part in text.strip("{}").split(","))
            return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
        if text in registers:
            return registers[text]
        return np.uint32(int(text[2:], 16) if text.startswith("0f") else int(text, 0))

    result = _INSTRUCTIONS[name](*map(value, sources))
    if target.startswith("{"):
        low, high = (part.strip() for part in target.strip("{}").split(","))
        registers[low], registers[high] = result & np.uint32(0xFFFF), result >> np.uint32(16)
    else:
        registers[target] = result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit i of the table is the result for the bits of a, b and c that make the number i."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for index in range(8):
        if int(table) >> index & 1:
            parts = (x if index >> at & 1 else ~x for x, at in ((a, 2), (b, 1), (c, 0)))
            first, second, third = parts
            result |= first & second & third
    return result


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Byte i of the result is that of (a, b) which the selector's nibble i names; with the nibble's
    fourth bit, that byte's sign in all bits."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint32(0)
    for index in range(4):
        nibble = (selector >> np.uint32(4 * index)) & np.uint32(15)
        shift = (8 * (nibble & np.uint32(7))).astype(np.uint64)
        byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte >= 128, np.uint32(255), np.uint32(0))
        result |= np.where(nibble >= 8, sign, byte) << np.uint32(8 * index)
    return np.asarray(result, np.uint32)


def _halves(word: Words, dtype: Any) -> NDArray[np.float64]:
    """[..., 2]: the low half first."""
    pair = np.stack([word & np.uint32(0xFFFF), word >> np.uint32(16)], axis=-1)
    return pair.astype(np.uint16).view(dtype).astype(np.float64)


def _two(dtype: Any, compute: Callable[..., NDArray[np.float64]]) -> Callable[..., Words]:
    def run(*words: Words) -> Words:
        words = np.broadcast_arrays(*words)
        result = compute(*(_halves(word, dtype) for word in words))
        bits = result.astype(np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
        return bits[..., 0] | bits[..., 1] << np.uint32(16)

    return run


def _two_int16(compute: Callable[..., Any]) -> Callable[..., Words]:
    def run(*words: Words) -> Words:
        words = np.broadcast_arrays(*words)
        halves = (np.stack([word & 0xFFFF, word >> 16], axis=-1) for word in words)
        result = compute(*(half.astype(np.uint16).view(np.int16) for half in halves))
        bits = result.view(np.uint16).astype(np.uint32)
        return bits[..., 0] | bits[..., 1] << np.uint32(16)

    return run


def _to_e4m3(word: Words) -> NDArray[np.uint16]:
    values = np.clip(_halves(word, np.float16), -448, 448)
    codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint16)
    return codes[..., 0] | codes[..., 1] << np.uint16(8)


def _both_to_e4m3(high: Words, low: Words) -> NDArray[np.uint16]:
    pair = (np.clip(_float32(each), -448, 448) for each in (low, high))
    codes = [each.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for each in pair]
    return codes[0].astype(np.uint16) | codes[1].astype(np.uint16) << np.uint16(8)


def _of_e4m3(codes: Words) -> Words:
    pair = np.stack([codes & np.uint32(0xFF), codes >> np.uint32(8)], axis=-1).astype(np.uint8)
    values = pair.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    bits = values.view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << np.uint32(16)


def _float32(words: Words) -> NDArray[np.float32]:
    return np.asarray(words, np.uint32).view(np.float32)


def _bf16(words: Words) -> Words:
    return _float32(words).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def _f16(words: Words) -> Words:
    with np.errstate(over="ignore"):
        return _float32(words).astype(np.float16).view(np.uint16).astype(np.uint32)


def _exp2(words: Words) -> Words:
    with np.errstate(over="ignore"):
        return np.exp2(_float32(words)).view(np.uint32)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "mul.f32": lambda a, b: (_float32(a) * _float32(b)).view(np.uint32),
    "add.f32": lambda a, b: (_float32(a) + _float32(b)).view(np.uint32),
    "ex2.approx.ftz.f32": _exp2,
    "rcp.approx.ftz.f32": lambda a: (1 / _float32(a)).view(np.uint32),
    "sub.f32": lambda a, b: (_float32(a) - _float32(b)).view(np.uint32),
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "add.s16x2": _two_int16(np.add),
    "max.s16x2": _two_int16(np.maximum),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _two(ml_dtypes.bfloat16, _fma),
    "fma.rn.f16x2": _two(np.float16, _fma),
    "mul.rn.f16x2": _two(np.float16, lambda a, b: a * b),
    "sub.f16x2": _two(np.float16, lambda a, b: a - b),
    "cvt.rn.f16x2.f32": lambda high, low: _f16(low) | _f16(high) << np.uint32(16),
    "cvt.rn.bf16x2.f32": lambda high, low: _bf16(low) | _bf16(high) << np.uint32(16),
    "cvt.rn.satfinite.e4m3x2.f16x2": _to_e4m3,
    "cvt.rn.satfinite.e4m3x2.f32": _both_to_e4m3,
    "cvt.rn.f16x2.e4m3x2": _of_e4m3,
}
