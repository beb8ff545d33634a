"""FP8 (e4m3) with a scale per tensor, per row, or per 128 x 128 block (DeepSeek, Qwen3-FP8)."""

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
    Fp8Codes,
    TensorInfo,
    expect,
    matrix_size,
    row_scales,
)
from jaxserve_checkpoints.reader import AnyArray

BLOCK = 128
"""Side of a block. Rows repeat their block's scale, which changes no value."""


@dataclass(frozen=True, kw_only=True)
class Fp8(Format):
    """weight[n, k] = e4m3(stored[n, k]) * scale[of n, or of n // 128 and k // 128, or of all]"""

    name: str
    """The configuration's name of the format."""
    blocks: bool
    scale: str = ".weight_scale"
    main: ClassVar[str] = ".weight"
    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".k_scale", ".v_scale")

    def describe(self) -> str:
        what = f"block of {BLOCK} x {BLOCK}" if self.blocks else "row or tensor"
        return f"{self.name}: e4m3 with a scale per {what}"

    def holds(self, main: TensorInfo) -> bool:
        return main.dtype == np.dtype("float8_e4m3fn")

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        return matrix_size(tensors, self.main)

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        if self.blocks:
            scale = expect((-(-out // BLOCK), -(-depth // BLOCK)), dtypes=FLOATS)
        else:
            scale = expect((out, 1), (out,), (1, 1), (1,), (), dtypes=FLOATS)
        return {
            self.main: expect((out, depth), dtypes="float8_e4m3fn"),
            self.scale: scale,
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Fp8Codes:
        values, scale = tensors[self.main], tensors[self.scale]
        if self.blocks:
            rows = jnp.repeat(scale.astype(jnp.float32), BLOCK, axis=0)
            return Fp8Codes(values, rows[: size[0]])
        return Fp8Codes(values, row_scales(scale, size[0]))
