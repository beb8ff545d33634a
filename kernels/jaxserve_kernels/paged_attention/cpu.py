"""Paged attention for CPUs, in JAX: each query tile visits only its own context.

The definition loops over the longest context of the step with all tiles, including padding. Here a
loop visits only real tiles. It takes a few tiles of similar contexts at a time, so that products
are large enough to be worth their overhead.

XLA compiles the operations of a loop once for all layers, if they are the same for all of them. So
values that layers share are computed outside of the loops, and the loop's counter encodes the layer
number. A constant layer number would compile separate kernels for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve_kernels.paged_attention.reference import (
    QueryTiles,
    Read,
    Softmax,
    first_seen,
    reader,
    tile_tokens,
)

_TOKENS = 16
"""Query tokens per group. A group has several tiles if tiles are smaller."""

_SINGLE_KEYS, _CHUNK_KEYS = 64, 128
"""Keys per block, for tiles of one token and for larger ones. Keys read past a tile's last position
are wasted, and each block costs about 20 us. Single tokens often have short contexts; larger tiles
have much to compute."""


class _Groups(NamedTuple):
    """Groups of tiles that are computed together. Empty groups come last."""

    places: Array
    """int32 [groups, n]: one row for each group, which `_Place` decodes."""
    pages: Array
    """uint32 [groups * blocks, tiles, pages per block]: page numbers of the groups' contexts."""
    used: Array
    """int32: number of groups that are not empty."""


class _Place(NamedTuple):
    """A group's row of `_Groups.places`."""

    tokens: Array
    """int32 [tiles * tile_size]: token indices; past the last token where there is none."""
    position: Array
    """int32 [tiles]: position of each tile's first token."""
    context: Array
    """int32 [tiles]: number of tokens whose keys the tile may see; 0 for an empty tile."""
    start: Array
    """int32 [tiles]: the first position that any token of the tile sees."""
    first: Array
    """int32 [1]: the first block to visit. No window reaches earlier ones."""
    end: Array
    """int32 [1]: the block after the last to visit; 0 for an empty group."""

    @classmethod
    def of(cls, row: Array, tiles: int) -> _Place:
        tokens = row.shape[0] - 3 * tiles - 2
        sizes = (tokens, *(tiles,) * 3, 1, 1)
        ends = list(itertools.accumulate(sizes))
        return cls(*(row[end - size : end] for size, end in zip(sizes, ends, strict=True)))


def paged_attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """See `reference.paged_attention`."""

    def read_layer(layer: Array) -> Read:
        return reader(kv, layer)

    return _attend(q, read_layer, layer, page_table, tiles, tile_size, kv.shape[4], window, sinks)


def attend_pages(
    q: Array,
    read: Read,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    page_size: int,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """See `reference.attend_pages`."""
    return _attend(q, lambda layer: read, 0, page_table, tiles, tile_size, page_size, window, sinks)


def _attend(
    q: Array,
    read: Callable[[Array], Read],
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    tile_size: int,
    page_size: int,
    window: int | None,
    sinks: Array | None,
) -> Array:
    """`attend_pages`; `read(layer)` returns the function that reads the layer's pages."""
    out = jnp.zeros_like(q)
    parts = [(tiles, tile_size)]
    if tiles.decode_rows is not None:
        parts.append((tiles.decode_rows, 1))
    for part, size in parts:
        keys = _SINGLE_KEYS if size == 1 else _CHUNK_KEYS
        pages = max(1, min(keys // page_size, page_table.shape[1]))
        together = max(1, min(_TOKENS // size, part.first.shape[0]))
        groups = _grouped(part, page_table, q.shape[0], size, together, page_size, pages, window)
        out = _add(out, q, read, layer, groups, size, together, pages * page_size, window, sinks)
    return out


def _grouped(
    tiles: QueryTiles,
    page_table: Array,
    num_tokens: int,
    tile_size: int,
    together: int,
    page_size: int,
    pages: int,
    window: int | None,
) -> _Groups:
    """Groups `together` tiles of similar contexts, whose keys are visited in blocks of `pages`
    pages."""
    missing = -tiles.first.shape[0] % together
    first, length, slot, position = (jnp.pad(each, (0, missing)) for each in tiles[:4])
    contexts = jnp.where(length > 0, position + length, 0)
    if 1 < together < first.shape[0]:
        order = jnp.argsort(-contexts)
        first, length, slot, position, contexts = (
            each[order] for each in (first, length, slot, position, contexts)
        )
    tables = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))[slot]
    by_block = tables.reshape(-1, together, tables.shape[1] // pages, pages).swapaxes(1, 2)
    places = QueryTiles(first, length, slot, position)
    block = pages * page_size
    starts = jnp.zeros_like(first) if window is None else first_seen(places, window)
    ends = lax.div(contexts.reshape(-1, together).max(axis=1) + block - 1, block)
    columns = (
        tile_tokens(places, tile_size, num_tokens)[0],
        position,
        contexts,
        starts,
        lax.div(starts.reshape(-1, together).min(axis=1), block),
        ends,
    )
    return _Groups(
        places=jnp.concatenate([each.reshape(len(ends), -1) for each in columns], axis=1),
        pages=by_block.reshape(-1, together, pages).astype(jnp.uint32),
        used=jnp.sum(ends > 0, dtype=jnp.int32),
    )


def _add(
    out: Array,
    q: Array,
    read: Callable[[Array], Read],
    layer: int,
    groups: _Groups,
    tile_size: int,
    tiles: int,
    block: int,
    window: int | None,
    sinks: Array | None,
) -> Array:
    """Stores the results of the groups' tokens in `out` [tokens, q_heads, head_dim]."""
    q_heads, head_dim = q.shape[1:]
    a_block = jax.eval_shape(lambda pages: read(pages[0, 0])(pages, 0), groups.pages[0])
    kv_heads = a_block.shape[2]
    count = groups.places.shape[0]
    blocks = groups.pages.shape[0] // count
    each_layer = count + 1  # one more than the number of groups: the value at which the loop ends

    def has_more(carry: tuple[Array, Array]) -> Array:
        return lax.rem(carry[0], each_layer) < groups.used

    def attend(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        counter, out = carry
        number = lax.rem(counter, each_layer)
        read_pages = read(lax.div(counter, each_layer).astype(jnp.uint32))
        place = _Place.of(_row(groups.places, number), tiles)
        # Unsigned: for signed indices JAX adds a test for negative ones.
        tokens = place.tokens.astype(jnp.uint32)
        queries = q.at[tokens].get(mode="clip")
        queries = queries.reshape(tiles, tile_size, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
        positions = place.position[:, None] + jnp.arange(tile_size)

        def visit(index: Array, carry: Softmax) -> Softmax:
            pages = _row(groups.pages, number * blocks + index)

            def keys_or_values(side: int) -> Array:
                found = read_pages(pages, side).astype(q.dtype)
                return found.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, block, head_dim)

            keys, values = keys_or_values(0), keys_or_values(1)
            scores = jnp.einsum(
                "nhgtd,nhkd->nhgtk", queries, keys, preferred_element_type=jnp.float32
            )
            key_position = index * block + jnp.arange(block)
            # An earlier owner may have left NaN past the end, and 0 * NaN is NaN.
            held = key_position < place.context[:, None]
            visible = held[:, None]  # a single token sees its whole context
            if tile_size > 1:
                visible = key_position <= positions[..., None]
            if window is not None:
                # The same holds for keys before the window.
                visible &= key_position > positions[..., None] - window
                held &= key_position >= place.start[:, None]
            values = jnp.where(held[:, None, :, None], values, 0)
            visible = visible[:, None, None]
            scores = jnp.where(visible, scores * head_dim**-0.5, -jnp.inf)
            # Without the barrier XLA masks and scales the scores twice: for the peak and the sum.
            return carry.add(lax.optimization_barrier(scores), values)

        first = place.first[0] if window is not None else jnp.int32(0)
        total = lax.fori_loop(first, place.end[0], visit, Softmax.start(queries.shape, sinks)).total
        found = total.transpose(0, 3, 1, 2, 4).reshape(-1, q_heads, head_dim)
        return counter + 1, out.at[tokens].set(found.astype(q.dtype), mode="drop")

    return lax.while_loop(has_more, attend, (jnp.int32(layer * each_layer), out))[1]


def _row(table: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(table, index, keepdims=False, allow_negative_indices=False)
