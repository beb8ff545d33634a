"""8-bit weights: integers, or e4m3 floating point, with scales per row or per group of inputs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.format import Kind, Operand, Quantized

E4M3_MAX = 448.0


class _Arrays(NamedTuple):
    packed: Array  # uint16 [out / 64, in / 128, 64, 64], see layout.pack_bytes
    scale: Array  # float32 [out / 64, groups, 64]; one group is a scale per row


class _EightBitWeight(_Arrays, Quantized):
    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return layout.logical_shape(self.packed, bits=8)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-2]

    def _operand(self, kind: Kind, tokens_in: Literal["int8", "e4m3"]) -> Operand | None:
        if self.group not in (128, self.shape[1]):
            return None
        return Operand(
            arrays=(self.packed, self.scale, self.scale),
            kind=kind,
            bits=8,
            group=self.group,
            tokens_in=tokens_in,
        )

    @staticmethod
    def values(codes: Array) -> Array:
        """float32 values of codes (uint8), before their scales."""
        raise NotImplementedError

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the values of the codes, by definition."""
        scale = layout.untile_rows(self.scale)
        if scale.shape[-1] > 1:
            scale = jnp.repeat(scale, self.group, axis=-1)
        return self.values(layout.unpack_bytes(self.packed)) * scale

    @property
    def has_rows(self) -> bool:
        return self.scale.shape[-2] == 1

    def take_rows(self, ids: Array) -> Array:
        """float32 [n, in]: rows `ids` [n] of a weight [out, in] with a scale per row."""
        if not self.has_rows:
            return super().take_rows(ids)
        tile, row = ids // layout.TILE_OUT, ids % layout.TILE_OUT
        codes = layout.take_byte_rows(self.packed, ids)
        return self.values(codes) * self.scale[tile, 0, row][:, None]


class Int8Weight(_EightBitWeight):
    """weight[n, k] = code[n, k] * scale[n, k // group], in float32; codes are -128..127."""

    __slots__ = ()

    @property
    def operand(self) -> Operand | None:
        return self._operand(Kind.INT8, "int8")

    @staticmethod
    def values(codes: Array) -> Array:
        """float32 values of codes (uint8), before their scales."""
        return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)


class Fp8Weight(_EightBitWeight):
    """weight[n, k] = e4m3(code[n, k]) * scale[n, k // group], in float32.

    e4m3 is OCP's "E4M3" without infinities (arXiv 2209.05433), largest value 448.
    """

    __slots__ = ()

    @property
    def operand(self) -> Operand | None:
        return self._operand(Kind.FP8, "e4m3")

    @staticmethod
    def values(codes: Array) -> Array:
        """float32 values of codes (uint8), before their scales."""
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def pack_int8(codes: Array, scale: Array) -> Int8Weight:
    """Makes a weight from int8 codes [..., out, in] and scales [..., out, groups]."""
    codes = jax.lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)
    return Int8Weight(layout.pack_bytes(codes), layout.tile_rows(scale.astype(jnp.float32)))


def pack_fp8(values: Array, scale: Array) -> Fp8Weight:
    """Makes a weight from float8_e4m3fn values [..., out, in] and scales [..., out, groups]."""
    codes = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return Fp8Weight(layout.pack_bytes(codes), layout.tile_rows(scale.astype(jnp.float32)))


def quantize_int8(weight: Array) -> Int8Weight:
    """Rounds to nearest, with one scale per row: the row's largest magnitude becomes 127."""
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127.0
    codes = jnp.round(wide * jnp.where(scale == 0, 0.0, 1.0 / scale))
    return pack_int8(jnp.clip(codes, -127, 127), scale)


def quantize_fp8(weight: Array, *, group: int | None = None) -> Fp8Weight:
    """Rounds to nearest, with one scale per row, or per `group` inputs of it: their largest
    magnitude becomes 448."""
    wide = weight.astype(jnp.float32)
    groups = wide.reshape(*wide.shape[:-1], -1, group or wide.shape[-1])
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / E4M3_MAX
    values = jnp.clip(groups * jnp.where(scale == 0, 0.0, 1.0 / scale), -E4M3_MAX, E4M3_MAX)
    return pack_fp8(values.reshape(wide.shape).astype(jnp.float8_e4m3fn), scale[..., 0])
