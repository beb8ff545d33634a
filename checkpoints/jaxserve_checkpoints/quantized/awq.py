"""AutoAWQ, version "gemm": 4-bit codes with zero points, packed along the outputs.

The eight nibbles of a word, low bits first, are its columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxserve_checkpoints.quantized.format import (
    FLOATS,
    Expected,
    Format,
    IntCodes,
    TensorInfo,
    expect,
    groups_of,
    int_codes,
    matrix_size,
    nibbles,
)
from jaxserve_checkpoints.reader import AnyArray

_PLACE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class Awq(Format):
    """weight[n, k] = (u[k, n] - zero[k // group, n]) * scale[k // group, n]"""

    group_size: int
    main: ClassVar[str] = ".qweight"

    def describe(self) -> str:
        return f"AutoAWQ, 4 bits, groups of {self.group_size}, zero points"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        depth, words = matrix_size(tensors, self.main)
        return 8 * words, depth

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        groups = groups_of(depth, self.group_size)
        return {
            ".qweight": expect((depth, out // 8), dtypes="int32"),
            ".qzeros": expect((groups, out // 8), dtypes="int32"),
            ".scales": expect((groups, out), dtypes=FLOATS),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> IntCodes:
        zero = _columns(tensors[".qzeros"]).astype(jnp.int32)
        return int_codes(_columns(tensors[".qweight"]).T, tensors[".scales"].T, zero.T)


def _columns(words: Array) -> Array:
    """int32 [rows, n] to uint8 [rows, 8 n]."""
    rows, count = words.shape
    each = nibbles(words).reshape(rows, count, 8)
    return each[..., jnp.array(_PLACE_OF_COLUMN)].reshape(rows, 8 * count)
