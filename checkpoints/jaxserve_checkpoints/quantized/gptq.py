"""GPTQ as AutoGPTQ and GPTQModel write it: 4-bit codes packed along the inputs, zero points packed
along the outputs. Version 1 stores each zero point minus 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve_checkpoints.quantized.format import (
    FLOATS,
    Expected,
    Format,
    Inconsistent,
    IntCodes,
    TensorInfo,
    expect,
    groups_of,
    int_codes,
    matrix_size,
    nibbles,
    order_of,
)
from jaxserve_checkpoints.reader import AnyArray

_ONES = 0x11111111


@dataclass(frozen=True, kw_only=True)
class Gptq(Format):
    """weight[n, k] = (u[k, n] - zero[g_idx[k], n]) * scale[g_idx[k], n]"""

    group_size: int
    symmetric: bool
    version: int
    """1: zero points are stored minus 1. 2: they are stored unchanged."""
    ordered: bool = False
    """Activation order (`desc_act`): g_idx gives the group of each input."""
    main: ClassVar[str] = ".qweight"

    def describe(self) -> str:
        kind = "symmetric" if self.symmetric else "zero points"
        return f"GPTQ (format {self.version}), 4 bits, groups of {self.group_size}, {kind}"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        words, out = matrix_size(tensors, self.main)
        return out, 8 * words

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        groups = groups_of(depth, self.group_size)
        return {
            ".qweight": expect((depth // 8, out), dtypes="int32"),
            ".qzeros": expect((groups, out // 8), dtypes="int32"),
            ".scales": expect((groups, out), dtypes=FLOATS),
            ".g_idx": expect((depth,), dtypes="int32", optional=not self.ordered),
        }

    def check(self, read: Callable[[str], AnyArray | None]) -> None:
        """Raises Inconsistent if `sym` is true and a zero point is not the middle code."""
        zeros = read(".qzeros")
        middle = 0x77777777 if self.version == 1 else 0x88888888
        if self.symmetric and zeros is not None and (zeros.view(np.uint32) != middle).any():
            raise Inconsistent(
                f"sym is true, but zero points differ from 8 (stored as format {self.version}: "
                f"{middle:#x} in each word of qzeros)"
            )

    def order(self, read: Callable[[str], AnyArray | None]) -> AnyArray | None:
        group_index = read(".g_idx")
        return None if group_index is None else order_of(group_index, self.group_size)

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> IntCodes:
        codes = nibbles(tensors[".qweight"].T)
        zero = None
        if not self.symmetric:
            words = tensors[".qzeros"].view(jnp.uint32)
            # Version 1 subtracts 1 from all nibbles by one subtraction from the whole word, in
            # which a zero point of 0 borrows from the next nibble. One addition undoes both.
            words = words + jnp.uint32(_ONES) if self.version == 1 else words
            zero = nibbles(words).T.astype(jnp.int32)
        codes = codes if order is None else codes[:, order]
        return int_codes(codes, tensors[".scales"].T, zero)
