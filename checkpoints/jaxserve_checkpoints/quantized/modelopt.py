"""NVIDIA modelopt's NVFP4: e2m1 in blocks of 16 with e4m3 scales and a scale per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxserve_checkpoints.quantized.format import (
    Expected,
    Format,
    Nvfp4Codes,
    TensorInfo,
    expect,
    groups_of,
    matrix_size,
    nibble_pairs,
)
from jaxserve_checkpoints.reader import AnyArray


@dataclass(frozen=True, kw_only=True)
class ModeloptNvfp4(Format):
    """weight[n, k] = e2m1(u[n, k]) * e4m3(weight_scale[n, k // 16]) * weight_scale_2"""

    main: ClassVar[str] = ".weight_scale_2"
    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".k_scale", ".v_scale")

    def describe(self) -> str:
        return "modelopt NVFP4"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        out, half = matrix_size(tensors, ".weight")
        return out, 2 * half

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            ".weight": expect((out, depth // 2), dtypes="uint8"),
            ".weight_scale": expect((out, groups_of(depth, 16)), dtypes="float8_e4m3fn"),
            ".weight_scale_2": expect((), (1,), dtypes="float32"),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Nvfp4Codes:
        rows = jnp.broadcast_to(tensors[".weight_scale_2"].reshape(()), (size[0],))
        return Nvfp4Codes(nibble_pairs(tensors[".weight"]), tensors[".weight_scale"], rows)
