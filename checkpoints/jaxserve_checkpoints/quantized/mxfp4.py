"""MXFP4 as gpt-oss stores it: e2m1 in blocks of 32 with a power of two for each (OCP MX 1.0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxserve_checkpoints.quantized.format import (
    Expected,
    Format,
    Inconsistent,
    Mxfp4Codes,
    TensorInfo,
    expect,
    nibble_pairs,
)
from jaxserve_checkpoints.reader import AnyArray
from jaxserve_kernels.weights import layout


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Format):
    """weight[n, 32 g + i] = e2m1(nibble i of blocks[n, g]) * 2 ** (scales[n, g] - 127)

    Tensors have the parameter's name, followed by `_blocks` and `_scales`.
    """

    main: ClassVar[str] = ".weight_blocks"

    def describe(self) -> str:
        return "MXFP4 in blocks, as gpt-oss"

    def size(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str], AnyArray]
    ) -> tuple[int, int]:
        """Returns (out, in). Raises Inconsistent if the blocks are not [out, in / 32, 16]."""
        shape = tensors[self.main].shape
        if len(shape) != 3:
            raise Inconsistent(f"weight_blocks {list(shape)} is not [out, in / 32, 16]")
        return shape[0], 32 * shape[1]

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            ".weight_blocks": expect((out, depth // 32, 16), dtypes="uint8"),
            ".weight_scales": expect((out, depth // 32), dtypes="uint8"),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Mxfp4Codes:
        return decode_blocks(tensors[".weight_blocks"], tensors[".weight_scales"])


@dataclass(frozen=True, kw_only=True)
class Mxfp4Experts(Mxfp4):
    """All experts of a layer in one tensor: `gate_up_proj_blocks` [experts, out, in / 32, 16]
    beside `gate_up_proj_scales`. Inputs are padded with zeros to a multiple of 128, which kernels
    need."""

    main: ClassVar[str] = "_blocks"
    pads: ClassVar[bool] = True

    def layout(self, out: int, depth: int) -> dict[str, Expected]:
        return {
            "_blocks": expect((out, depth // 32, 16), dtypes="uint8"),
            "_scales": expect((out, depth // 32), dtypes="uint8"),
        }

    def decode(
        self, tensors: Mapping[str, Array], size: tuple[int, int], order: Array | None
    ) -> Mxfp4Codes:
        codes, exponents = decode_blocks(tensors["_blocks"], tensors["_scales"])
        missing = -size[1] % layout.TILE_IN
        return Mxfp4Codes(
            jnp.pad(codes, ((0, 0), (0, missing))),
            jnp.pad(exponents, ((0, 0), (0, missing // 32))),
        )


def decode_blocks(blocks: Array, scales: Array) -> Mxfp4Codes:
    """Decodes uint8 blocks [..., out, in / 32, 16], low halves first, and exponents [..., out, in /
    32]."""
    codes = nibble_pairs(blocks)
    return Mxfp4Codes(codes.reshape(*blocks.shape[:-2], -1), scales)
