"""Memory layout of KVarN: packed pages, and tiles in full precision per slot.

One page is one tile of `group` tokens. A 16-bit word holds four codes of one token and head, whose
channels are a quarter of the head apart. So a GPU unpacks words into matrices without shuffles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxserve_kernels.kv_format.base import CacheArrays
from jaxserve_kernels.kv_format.kvarn import codec
from jaxserve_kernels.kv_format.kvarn.codec import Coded

SINK, TAIL = 0, 1
"""Indices of a slot's tiles in full precision: the sequence's first page, and its growing page."""


class _Arrays(NamedTuple):
    key_words: Array  # int16 [layers, pages, kv_heads, group, quarter]
    value_words: Array  # int16 [layers, pages, kv_heads, group (4 bits) or group/2, quarter]
    scales: Array  # float16 [layers, pages, kv_heads, 3 * (head_dim + group)], see `Scales`
    raw: Array  # [layers, slots, 2, kv_heads, 2, group, head_dim]: sink and tail; keys, values


class KVarNKV(_Arrays, CacheArrays):
    """The cache. `quarter` is head_dim/4.

    Word [token, i] of the keys holds the codes of channels i, i + quarter, ... in its bits 0-3,
    4-7, .... Words of 4-bit values are the same; those of 2-bit values hold two tokens, half a
    tile apart: word [token, i] has the codes of `token` in bits 0-7 and of token + group/2 in 8-15.
    """

    __slots__ = ()

    @property
    def group(self) -> int:
        """Tokens of a tile, and of a page."""
        return self.raw.shape[5]

    @property
    def value_bits(self) -> int:
        """Bits of a value's code: 4 or 2."""
        return 4 * self.value_words.shape[3] // self.group


class Scales(NamedTuple):
    """The parts of a page's scales, in memory order. Two scales make a 32-bit word, the smallest
    unit of asynchronous copies. A row's scale is stored beside its zero; a column's scale beside
    that of the column half of the columns later."""

    key_scale: Array  # [head_dim]
    key_zero: Array  # [head_dim]
    value_column: Array  # [head_dim]
    key_column: Array  # [group]
    value_scale: Array  # [group]
    value_zero: Array  # [group]


def join_scales(parts: Scales) -> Array:
    """Interleaves the parts to scales [..., 3 * (head_dim + group)]."""
    return jnp.concatenate(
        [
            _side_by_side(parts.key_scale, parts.key_zero),
            _side_by_side(*jnp.split(parts.value_column, 2, axis=-1)),
            _side_by_side(*jnp.split(parts.key_column, 2, axis=-1)),
            _side_by_side(parts.value_scale, parts.value_zero),
        ],
        axis=-1,
    )


def split_scales(scales: Array, head_dim: int) -> Scales:
    """The inverse of `join_scales`."""
    group = scales.shape[-1] // 3 - head_dim
    ends = (2 * head_dim, 3 * head_dim, 3 * head_dim + group)
    words = (part.reshape(*part.shape[:-1], -1, 2) for part in jnp.split(scales, ends, axis=-1))
    keys, value_column, key_column, values = words
    return Scales(
        keys[..., 0],
        keys[..., 1],
        jnp.concatenate([value_column[..., 0], value_column[..., 1]], axis=-1),
        jnp.concatenate([key_column[..., 0], key_column[..., 1]], axis=-1),
        values[..., 0],
        values[..., 1],
    )


def _side_by_side(first: Array, second: Array) -> Array:
    """Interleaves two arrays [..., n] to [..., 2 * n]."""
    return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)


def chunk_pages(step_tokens: int, sequences: int, group: int) -> int:
    """The most pages that a step's chunks can occupy. Each chunk has two tokens or more."""
    return -(-step_tokens // group) + 2 * min(sequences, step_tokens // 2)


def pack(codes: Array, bits: int) -> Array:
    """Packs codes, uint8 [..., tokens, head_dim], into int16 words: see KVarNKV."""
    *outer, tokens, head_dim = codes.shape
    halves = 4 // bits
    split = codes.astype(jnp.uint16).reshape(*outer, halves, tokens // halves, 4, head_dim // 4)
    words = jnp.zeros((*outer, tokens // halves, head_dim // 4), jnp.uint16)
    for half in range(halves):
        for quarter in range(4):
            words |= split[..., half, :, quarter, :] << (bits * (4 * half + quarter))
    return lax.bitcast_convert_type(words, jnp.int16)


def unpack(words: Array, bits: int) -> Array:
    """The inverse of `pack`."""
    wide = lax.bitcast_convert_type(words, jnp.uint16)
    mask = jnp.uint16((1 << bits) - 1)
    halves = [
        jnp.concatenate(
            [(wide >> (bits * (4 * half + quarter))) & mask for quarter in range(4)], axis=-1
        )
        for half in range(4 // bits)
    ]
    return jnp.concatenate(halves, axis=-2).astype(jnp.uint8)


def encode_tiles(tiles: Array, value_bits: int) -> tuple[Array, Array, Array]:
    """Encodes rotated tiles [..., 2, group, head_dim]. Returns key words, value words and
    scales."""
    tiles = tiles.astype(jnp.float32)
    keys = codec.encode_keys(tiles[..., 0, :, :])
    values = codec.encode_values(tiles[..., 1, :, :], value_bits)
    scales = Scales(
        keys.row_scale, keys.row_zero, values.column_scale,
        keys.column_scale, values.row_scale, values.row_zero,
    )  # fmt: skip
    return (
        pack(jnp.swapaxes(keys.codes, -1, -2), 4),
        pack(values.codes, value_bits),
        join_scales(scales),
    )


def decode_tiles(
    key_words: Array, value_words: Array, scales: Array, value_bits: int
) -> tuple[Array, Array]:
    """Decodes tiles. Returns rotated keys and values, float32 [..., group, head_dim] each."""
    parts = split_scales(scales, 4 * key_words.shape[-1])
    codes = jnp.swapaxes(unpack(key_words, 4), -1, -2)
    keys = codec.decode(Coded(codes, parts.key_scale, parts.key_zero, parts.key_column))
    codes = unpack(value_words, value_bits)
    values = codec.decode(Coded(codes, parts.value_scale, parts.value_zero, parts.value_column))
    return jnp.swapaxes(keys, -1, -2), values
