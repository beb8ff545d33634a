"""Memory layout of the codes of quantised weights. Weights are packed when they are loaded.

A weight [out, in] is cut into contiguous tiles of 64 outputs by 128 inputs. A tile's codes are
planes of 16-bit words: one load and a few bitwise instructions give whole vectors of consecutive
inputs, without shuffles:

- 4-bit integers: word (n, j), j < 32, holds inputs j, 32 + j, 64 + j and 96 + j of row n, from the
  low bits up. A group of 32, 64 or 128 inputs is one, two or four planes. NVFP4 has tiles of 64
  inputs, and a plane of 16 inputs is one block.
- MXFP4: word (n, 8 i + u), i < 4, u < 8, holds inputs 32 i + u, 32 i + 8 + u, 32 i + 16 + u and
  32 i + 24 + u. So eight words, 16 contiguous bytes, are a block of 32 inputs: a thread that loads
  them needs one scale. A plane has eight inputs of each block (`swap_eights`).
- 8-bit codes: word (n, j), j < 64, holds inputs j (low byte) and 64 + j.

Scales and zero points of rows and groups are [out / 64, groups, 64]. All functions accept any
leading axes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

TILE_OUT = 64
TILE_IN = 128


def pack_nibbles(codes: Array, depth: int = TILE_IN) -> Array:
    """Packs integers 0..15 [..., out, in] into uint16 [..., out / 64, in / depth, 64, depth /
    4]."""
    return _pack(codes, bits=4, depth=depth)


def unpack_nibbles(packed: Array) -> Array:
    """The inverse: uint8 [..., out, in]."""
    return _unpack(packed, bits=4)


def pack_blocks(codes: Array) -> Array:
    """Packs integers 0..15 [..., out, in] into uint16 [..., out / 64, in / 128, 64, 32], eight
    words for each 32 inputs."""
    return pack_nibbles(swap_eights(codes))


def unpack_blocks(packed: Array) -> Array:
    """The inverse: uint8 [..., out, in]."""
    return swap_eights(unpack_nibbles(packed))


def swap_eights(values: Array) -> Array:
    """Of each 128 values [..., in], the eight at 32 i + 8 j and those at 32 j + 8 i change places.
    So inputs take the order of MXFP4's planes, and the other way round."""
    _check_multiple("in", values.shape[-1], TILE_IN)
    eights = values.reshape(*values.shape[:-1], -1, 4, 4, 8)
    return jnp.swapaxes(eights, -2, -3).reshape(values.shape)


def pack_bytes(codes: Array) -> Array:
    """Packs integers 0..255 [..., out, in] into uint16 [..., out / 64, in / 128, 64, 64]."""
    return _pack(codes, bits=8, depth=TILE_IN)


def unpack_bytes(packed: Array) -> Array:
    """The inverse: uint8 [..., out, in]."""
    return _unpack(packed, bits=8)


def take_byte_rows(packed: Array, ids: Array) -> Array:
    """Codes of rows `ids` [n] of packed bytes without leading axes: uint8 [n, in]."""
    words = packed[ids // TILE_OUT, :, ids % TILE_OUT]  # [n, in / 128, 64]
    shifts = 8 * jnp.arange(2, dtype=words.dtype)[:, None]  # jnp.stack would take more kernels
    planes = (words[:, :, None] >> shifts) & 255
    return planes.astype(jnp.uint8).reshape(ids.shape[0], -1)


def tile_rows(values: Array) -> Array:
    """Values per row and group: [..., out, groups] to [..., out / 64, groups, 64]."""
    *leading, out, groups = values.shape
    _check_multiple("out", out, TILE_OUT)
    return jnp.swapaxes(values.reshape(*leading, out // TILE_OUT, TILE_OUT, groups), -1, -2)


def untile_rows(tiled: Array) -> Array:
    """The inverse: [..., out, groups]."""
    *leading, tiles, groups, rows = tiled.shape
    return jnp.swapaxes(tiled, -1, -2).reshape(*leading, tiles * rows, groups)


def or_one(values: Array) -> Array:
    """Values with 0 replaced by 1, to divide by."""
    return jnp.where(values == 0, 1.0, values)


def logical_shape(packed: Array, bits: int) -> tuple[int, ...]:
    """The shape [..., out, in] of a weight with packed codes of `bits` bits."""
    *leading, out_tiles, in_tiles, rows, words = packed.shape
    return (*leading, out_tiles * rows, in_tiles * words * 16 // bits)


def _pack(codes: Array, *, bits: int, depth: int) -> Array:
    *leading, out, inputs = codes.shape
    _check_multiple("out", out, TILE_OUT)
    _check_multiple("in", inputs, depth)
    planes = 16 // bits
    tiles = (out // TILE_OUT, TILE_OUT, inputs // depth, planes, depth // planes)
    words = codes.astype(jnp.uint16).reshape(*leading, *tiles)
    packed = words[..., 0, :]
    for plane in range(1, planes):
        packed |= words[..., plane, :] << (bits * plane)
    return jnp.swapaxes(packed, -2, -3)


def _unpack(packed: Array, *, bits: int) -> Array:
    planes = 16 // bits
    mask = (1 << bits) - 1
    codes = [(packed >> (bits * plane)) & mask for plane in range(planes)]
    rows_last = jnp.stack(codes, axis=-2).astype(jnp.uint8)  # [.., tiles, groups, rows, planes, j]
    return jnp.swapaxes(rows_last, -3, -4).reshape(logical_shape(packed, bits))


def _check_multiple(name: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise ValueError(
            f"a quantised weight's {name} must be a multiple of {multiple}, got {size}"
        )
