"""The definition of the 8-bit formats, in plain JAX.

The bytes of one head are stored in pairs, as 16-bit words: a GPU can load 16-bit matrices into the
layout of its tensor cores, but not 8-bit ones. Word i holds element i in its low byte and element
i + head_dim/2 in its high byte.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs.reference import HeadWeights, heads_of
from jaxserve_kernels.kv_format.base import AttentionStep, CacheArrays
from jaxserve_kernels.paged_attention import attend_pages
from jaxserve_kernels.target import Target

FP8_MAX = 448.0
"""The largest finite e4m3 number (OCP 8-bit floating point specification, revision 1.0)."""


class _Arrays(NamedTuple):
    words: Array  # int16 [layers, pages, kv_heads, 2, page_size, head_dim/2]
    scales: Array  # float32, see below


class EightBitKV(_Arrays, CacheArrays):
    """A cache of bytes and scales."""

    __slots__ = ()

    @property
    def fp8(self) -> bool:
        """True: the bytes are e4m3 numbers with given scales. False: they are integers, whose
        scales are computed and stored when they are written."""
        raise NotImplementedError

    def read(self, layer: int, pages: Array, side: int) -> Array:
        """Keys (side 0) or values (1) of `pages`, an array of any shape: float32 [*pages.shape,
        kv_heads, page_size, head_dim]."""
        raise NotImplementedError

    def write(self, layer: int, keys: Array, values: Array, step: AttentionStep) -> Self:
        """The cache after writing keys and values [tokens, kv_heads, head_dim] to their pages and
        offsets."""
        raise NotImplementedError

    def _with_words(self, layer: int, words: Array, step: AttentionStep) -> Self:
        place = self.words.at[layer, step.pages, :, :, step.offsets]
        return self._replace(words=place.set(words))


class Int8KV(EightBitKV):
    """int8: element = (byte - 128) * scale, with scale = largest magnitude of the head / 127.

    scales are float32 [layers, pages, kv_heads, 2, page_size].
    """

    __slots__ = ()

    @property
    def fp8(self) -> bool:
        return False

    def read(self, layer: int, pages: Array, side: int) -> Array:
        words = self.words[layer, pages, :, side]
        return decode_int8(words, self.scales[layer, pages, :, side])

    def write(self, layer: int, keys: Array, values: Array, step: AttentionStep) -> Self:
        words, scales = encode_int8(jnp.stack([keys, values], axis=2))
        place = self.scales.at[layer, step.pages, :, :, step.offsets]
        return self._replace(scales=place.set(scales))._with_words(layer, words, step)


class Fp8KV(EightBitKV):
    """fp8: element = e4m3 number * scale. Magnitudes above 448 * scale are clipped to it.

    scales are float32 [layers, kv_heads, 2].
    """

    __slots__ = ()

    @property
    def fp8(self) -> bool:
        return True

    def read(self, layer: int, pages: Array, side: int) -> Array:
        words = self.words[layer, pages, :, side]
        scales = self.scales[layer, :, side, None]
        return decode_fp8(words, jnp.broadcast_to(scales, words.shape[:-1]))

    def write(self, layer: int, keys: Array, values: Array, step: AttentionStep) -> Self:
        both = jnp.stack([keys, values], axis=2)
        words = encode_fp8(both, jnp.broadcast_to(self.scales[layer], both.shape[:-1]))
        return self._with_words(layer, words, step)


def pair(elements: Array) -> Array:
    """Packs bytes, uint8 [..., head_dim], into words, int16 [..., head_dim/2]."""
    low, high = jnp.split(elements.astype(jnp.uint16), 2, axis=-1)
    return lax.bitcast_convert_type(low | (high << 8), jnp.int16)


def unpair(words: Array) -> Array:
    """The inverse of `pair`: int16 [..., head_dim/2] to uint8 [..., head_dim]."""
    wide = lax.bitcast_convert_type(words, jnp.uint16)
    both = jnp.concatenate([wide & 0xFF, wide >> 8], axis=-1)
    return both.astype(jnp.uint8)


def encode_int8(x: Array) -> tuple[Array, Array]:
    """Encodes x [..., head_dim]. Returns words [..., head_dim/2] and scales [...]."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    inverse = jnp.where(largest > 0, 127.0 / largest, 0.0)
    codes = jnp.round(x * inverse[..., None]) + 128
    return pair(codes.astype(jnp.uint8)), largest / 127.0


def decode_int8(words: Array, scales: Array) -> Array:
    """float32 [..., head_dim] of words [..., head_dim/2] and scales [...]."""
    return (unpair(words).astype(jnp.float32) - 128) * scales[..., None]


def encode_fp8(x: Array, scales: Array) -> Array:
    """Encodes x [..., head_dim] with given scales [...] as words [..., head_dim/2]."""
    scaled = jnp.clip(x.astype(jnp.float32) / scales[..., None], -FP8_MAX, FP8_MAX)
    return pair(lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8))


def decode_fp8(words: Array, scales: Array) -> Array:
    """float32 [..., head_dim] of words [..., head_dim/2] and scales [...]."""
    numbers = lax.bitcast_convert_type(unpair(words), jnp.float8_e4m3fn)
    return numbers.astype(jnp.float32) * scales[..., None]


def largest_magnitudes(kv: Fp8KV) -> Array:
    """The largest magnitudes in all pages but padding's, float32 [layers, kv_heads, 2]: keys, then
    values. They are at most 448 * scale, because larger ones were clipped.

    Without their signs, the bytes of e4m3 numbers are in the order of the numbers.
    """
    bits = lax.bitcast_convert_type(kv.words[:, 1:], jnp.uint16)
    largest = jnp.maximum(bits & 0x7F, (bits >> 8) & 0x7F).max(axis=(1, 4, 5))
    numbers = lax.bitcast_convert_type(largest.astype(jnp.uint8), jnp.float8_e4m3fn)
    return numbers.astype(jnp.float32) * kv.scales


def attend[Cache: EightBitKV](
    qkv: Array,
    kv: Cache,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
    target: Target,
) -> tuple[Array, Cache]:
    """See `kv_format.attend`. Only keys and values are rounded to the format."""
    q, k, v = heads_of(qkv, heads, tables, kv_heads=kv.words.shape[2], eps=eps, dtype=dtype)
    kv = kv.write(layer, k, v, step)
    out = attend_pages(
        q.astype(jnp.float32),
        lambda pages, side: kv.read(layer, pages, side),
        step.page_table,
        step.tiles,
        tile_size=tile_size,
        page_size=kv.words.shape[4],
        window=window,
        sinks=heads.sinks,
        target=target,
    )
    return out.astype(dtype), kv
