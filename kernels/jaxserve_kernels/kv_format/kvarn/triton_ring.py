"""Copies the units of a KVarN context ahead into a ring in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

TILES = gl.constexpr(8)
"""Tiles in a stage of the ring, each `_CHUNK` tokens by a quarter of a head. In full precision,
keys and values take four each; as words of codes two each, and 2-bit values one."""


@gluon.jit
def _places(PARTS: gl.constexpr, CHUNK: gl.constexpr, QUARTER: gl.constexpr):
    """Indices of parts, rows and words in tiles [parts, rows, words], for 16-byte copies."""
    copy: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // QUARTER, QUARTER // 8], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    rows: gl.constexpr = gl.SliceLayout(0, copy)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, rows))
    word = gl.arange(0, QUARTER, gl.SliceLayout(0, rows))
    return (
        gl.expand_dims(gl.expand_dims(part, 1), 2),
        gl.expand_dims(gl.expand_dims(row, 1), 0),
        gl.expand_dims(gl.expand_dims(word, 0), 0),
    )


@gluon.jit
def _copy_raw(
    tiles, source, held, GROUP: gl.constexpr, QUARTER: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """Copies a chunk of keys and of values in full precision: the first `held`, then zeros."""
    part, row, word = _places(TILES, CHUNK, QUARTER)
    source = source.to(gl.pointer_type(gl.int16), bitcast=True)
    source += part // 4 * (4 * GROUP * QUARTER) + part % 4 * QUARTER + row * (4 * QUARTER) + word
    async_copy.async_load(tiles, source, mask=row < held)


@gluon.jit
def _copy_words(
    tiles, source, PARTS: gl.constexpr, QUARTER: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """Copies the words of codes of PARTS times CHUNK tokens."""
    part, row, word = _places(PARTS, CHUNK, QUARTER)
    source += part * (CHUNK * QUARTER) + row * QUARTER + word
    async_copy.async_load(tiles, source)


@gluon.jit
def _copy_scales(vectors, source, LENGTH: gl.constexpr):
    """Copies three vectors of 32-bit words, each with two scales."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    part = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    source = source.to(gl.pointer_type(gl.int32), bitcast=True) + part * LENGTH
    source += gl.expand_dims(gl.arange(0, LENGTH, gl.SliceLayout(0, layout)), 0)
    async_copy.async_load(vectors, source, mask=part < 3)


@gluon.jit
def copy_unit(
    index, stage, page, ring, scales, key_words_ptr, value_words_ptr, scales_ptr, raw_ptr,
    first_tile, own_tile, sink_units, raw_units, offset, kv_head,
    kv_heads: gl.constexpr, GROUP: gl.constexpr, QUARTER: gl.constexpr, BITS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Copies one unit of a context: a chunk of the sink, a chunk of the token's own page, or the
    codes of `page`. `offset`: tokens of the own page that earlier steps have stored."""
    DIM: gl.constexpr = 4 * QUARTER
    tiles = ring.index(stage)
    if index < raw_units:
        in_own = index >= sink_units
        first = (index - gl.where(in_own, sink_units, 0)) * CHUNK
        kept = gl.where(in_own, own_tile, first_tile)
        source = raw_ptr + ((kept * kv_heads + kv_head) * 2 * GROUP + first) * DIM
        held = gl.where(in_own, offset, GROUP) - first
        _copy_raw(tiles, source, held, GROUP, QUARTER, CHUNK)
    else:
        tile = page.to(gl.int64) * kv_heads + kv_head
        keys = key_words_ptr + tile * (GROUP * QUARTER)
        _copy_words(tiles.slice(0, 2), keys, 2, QUARTER, CHUNK)
        values = value_words_ptr + tile * (GROUP * BITS // 4 * QUARTER)
        _copy_words(tiles.slice(2, BITS // 2), values, BITS // 2, QUARTER, CHUNK)
        _copy_scales(scales.index(stage), scales_ptr + tile * (3 * (DIM + GROUP)), GROUP)


@gluon.jit
def units_of(position, GROUP: gl.constexpr, CHUNK: gl.constexpr):
    """The units of a context: see `triton_attention.units_of`."""
    own = position // GROUP
    sink = gl.minimum(own, 1) * (GROUP // CHUNK)
    raw = sink + position % GROUP // CHUNK + 1
    return sink, raw, raw + gl.maximum(own - 1, 0)
