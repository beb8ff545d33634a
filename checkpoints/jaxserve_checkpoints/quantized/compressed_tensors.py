"""compressed-tensors (llm-compressor): integers packed along the inputs, and 4-bit floating point.

Packed integers and zero points are stored plus 8. Zero points are packed along the outputs.
"""

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
    Int8Codes,
    IntCodes,
    Mxfp4Codes,
    Nvfp4Codes,
    TensorInfo,
    expect,
    groups_of,
    int_codes,
    matrix_size,
    nibble_pairs,
    nibbles,
    order_of,
    row_scales,
    stored_size,
)
from jaxserve_checkpoints.reader import AnyArray


@dataclass(frozen=True, kw_only=True)
class PackQuantized(Format):
    """weight[n, k] = (u[n, k] - zero[n, group of k]) * scale[n, group of k]; symmetric: zero 8"""

    group_size: int
    symmetric: bool
    ordered: bool = False
    """Activation order: weight_g_idx gives the group of each input."""
    main: ClassVar[str] = ".weight_packed"

    def describe(self) -> str:
        kind = "symmetric" if self.symmetric else "zero points"
        return f"compressed-tensors pack-quantized, 4 bits, groups of {self.group_size}, {kind}"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        return stored_size(tensors, ".weight_shape", read)

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        groups = groups_of(depth, self.group_size)
        tensors = {
            ".weight_packed": expect((out, -(-depth // 8)), dtypes="int32"),
            ".weight_scale": expect((out, groups), dtypes=FLOATS),
            ".weight_shape": expect((2,), dtypes="int64 int32"),
            ".weight_g_idx": expect((depth,), dtypes="int32", optional=not self.ordered),
        }
        if not self.symmetric:
            tensors[".weight_zero_point"] = expect((-(-out // 8), groups), dtypes="int32")
        return tensors

    def order(self, read: Callable[[str], AnyArray | None]) -> AnyArray | None:
        group_index = read(".weight_g_idx")
        return None if group_index is None else order_of(group_index, self.group_size)

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> IntCodes:
        out, depth = size
        codes = nibbles(tensors[".weight_packed"])[:, :depth]
        zero = None
        if not self.symmetric:
            zero = nibbles(tensors[".weight_zero_point"].T).T[:out].astype(jnp.int32)
        codes = codes if order is None else codes[:, order]
        return int_codes(codes, tensors[".weight_scale"], zero)


@dataclass(frozen=True, kw_only=True)
class IntQuantized(Format):
    """weight[n, k] = q[n, k] * scale[n], 8 bits"""

    main: ClassVar[str] = ".weight_scale"
    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".input_zero_point")

    def describe(self) -> str:
        return "compressed-tensors int-quantized, 8 bits, a scale per row or tensor"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        return matrix_size(tensors, ".weight")

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            ".weight": expect((out, depth), dtypes="int8"),
            ".weight_scale": expect((out, 1), (out,), (1,), (), dtypes=FLOATS),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Int8Codes:
        return Int8Codes(tensors[".weight"], row_scales(tensors[".weight_scale"], size[0]))


class _Fp4Packed(Format):
    """Codes of e2m1, two in a byte."""

    main: ClassVar[str] = ".weight_packed"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        out, half = matrix_size(tensors, self.main)
        return out, 2 * half


@dataclass(frozen=True, kw_only=True)
class Nvfp4Packed(_Fp4Packed):
    """weight[n, k] = e2m1(u[n, k]) * e4m3(scale[n, k // 16]) / global_scale"""

    unused: ClassVar[tuple[str, ...]] = (".input_global_scale",)

    def describe(self) -> str:
        return "compressed-tensors nvfp4-pack-quantized"

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            ".weight_packed": expect((out, depth // 2), dtypes="uint8"),
            ".weight_scale": expect((out, groups_of(depth, 16)), dtypes="float8_e4m3fn"),
            ".weight_global_scale": expect((1,), (), dtypes="float32 float64"),
        }

    def prepared(self, suffix: str, array: AnyArray) -> AnyArray:
        """Returns the inverse of the global scale, rounded once; other tensors as they are."""
        if suffix != ".weight_global_scale":
            return array
        with np.errstate(divide="ignore"):
            return (1.0 / array.astype(np.float64)).astype(np.float32)

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Nvfp4Codes:
        rows = jnp.broadcast_to(tensors[".weight_global_scale"].reshape(()), (size[0],))
        return Nvfp4Codes(nibble_pairs(tensors[".weight_packed"]), tensors[".weight_scale"], rows)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Packed(_Fp4Packed):
    """weight[n, k] = e2m1(u[n, k]) * 2 ** (scale[n, k // 32] - 127)"""

    def describe(self) -> str:
        return "compressed-tensors mxfp4-pack-quantized"

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            ".weight_packed": expect((out, depth // 2), dtypes="uint8"),
            ".weight_scale": expect((out, groups_of(depth, 32)), dtypes="uint8"),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Mxfp4Codes:
        return Mxfp4Codes(nibble_pairs(tensors[".weight_packed"]), tensors[".weight_scale"])
