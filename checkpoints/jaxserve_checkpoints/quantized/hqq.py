"""HQQ: 4-bit codes with floating-point zero points. With packing "4bit_u8" the high half of each
byte belongs to the first half of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxserve_checkpoints.quantized.format import (
    FLOATS,
    Codes,
    Expected,
    Format,
    Inconsistent,
    Int8Codes,
    TensorInfo,
    expect,
    groups_of,
    int_codes,
    stored_size,
)
from jaxserve_checkpoints.reader import AnyArray

_REQUANTIZED_GROUP = 128
_PACKING = b"4bit_u8"


@dataclass(frozen=True, kw_only=True)
class Hqq(Format):
    """weight = (u - zero) * scale, with the weight reshaped to rows of groups.

    Axis 1: each row is a group of consecutive inputs. Axis 0: the weight is reshaped to
    `group_size` rows and each column is a group. No kernel reads such groups, so the weight is
    dequantised and rounded to 8 bits with one scale per 128 inputs.
    """

    group_size: int
    axis: int
    main: ClassVar[str] = ".W_q"
    unused: ClassVar[tuple[str, ...]] = (
        *(".nbits", ".group_size", ".axis", ".packing", ".unpack_view_dtype", ".view_as_float"),
        *(".quant_scale", ".quant_zero", ".compute_dtype", ".stores_quant_config"),
        *(".channel_wise", ".optimize", ".round_zero", ".offload_meta", ".encoded_state_dict"),
    )

    def describe(self) -> str:
        text = f"HQQ, 4 bits, groups of {self.group_size}, axis {self.axis}"
        if self.axis == 0:
            text += (
                "; groups along the outputs are rounded to 8 bits, an error of up to 1% of a weight"
            )
        return text

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        return stored_size(tensors, ".shape", read)

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        if self.axis == 1:
            rows, columns = out * groups_of(depth, self.group_size), self.group_size
            scale = (rows, 1)
        else:
            rows, columns = self.group_size, out * depth // self.group_size
            scale = (1, columns)
        return {
            ".W_q": expect((rows // 2, columns), dtypes="uint8"),
            ".scale": expect(scale, dtypes=FLOATS),
            ".zero": expect(scale, dtypes=FLOATS),
            ".shape": expect((2,), dtypes="int64 int32"),
        }

    def check(self, read: Callable[[str], AnyArray | None]) -> None:
        """Raises Inconsistent if settings among the tensors differ from the checkpoint's."""
        wanted = {".nbits": 4, ".group_size": self.group_size, ".axis": self.axis}
        wanted |= {".view_as_float": 0, ".quant_scale": 0, ".quant_zero": 0}
        for name, value in wanted.items():
            found = read(name)
            if found is not None and found.ravel().tolist() != [value]:
                raise Inconsistent(f"{name[1:]} is {found.tolist()}, should be {value}")
        packing = read(".packing")
        if packing is not None and packing.tolist() != list(_PACKING):
            text = packing.tobytes().decode(errors="replace")
            raise Inconsistent(f"packing is {text!r:.40}, should be {_PACKING.decode()!r}")

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Codes:
        packed = tensors[".W_q"]
        codes = jnp.concatenate([packed >> 4, packed & 15])
        scale = tensors[".scale"].astype(jnp.float32)
        zero = tensors[".zero"].astype(jnp.float32)
        out = size[0]
        if self.axis == 1:
            return int_codes(codes.reshape(size), scale.reshape(out, -1), zero.reshape(out, -1))
        return _rounded(((codes.astype(jnp.float32) - zero) * scale).reshape(size))


def _rounded(weight: Array) -> Int8Codes:
    """Rounds to 8 bits with one scale per 128 inputs, whose largest magnitude becomes 127."""
    out, depth = weight.shape
    grouped = weight.reshape(out, depth // _REQUANTIZED_GROUP, _REQUANTIZED_GROUP)
    scale = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / 127.0
    codes = jnp.round(grouped * jnp.where(scale == 0, 0.0, 1.0 / scale))
    return Int8Codes(codes.astype(jnp.int8).reshape(weight.shape), scale[..., 0])
