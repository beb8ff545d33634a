"""Paged attention for CPUs, in JAX: each query tile visits its own context and no more.

The definition takes all tiles of a step through the longest context together, places of tiles that
hold nothing included. Here a loop takes the tiles that there are, a few of similar contexts at a
time, so that products are large enough to be worth their start.

Each operation in a loop is a kernel that XLA compiles once for all layers, if it is the same for
all of them. So what they share is computed outside of the loops, and within a loop its counter
says which layer it is: a constant would make kernels of their own.
"""

from __future__ import annotations

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
"""Query tokens at a time, of several tiles if those are smaller."""

_SINGLE_KEYS, _CHUNK_KEYS = 64, 128
"""Keys of each tile at a time. What is read behind a tile's last position is lost, and each time
costs about 20 us: single tokens have often short contexts, longer tiles much to compute."""


class _Groups(NamedTuple):
    """Tiles that are computed together. Groups that hold something come first.

    Indices are unsigned: JAX asks of others whether they count from the end.
    """

    tokens: Array
    """uint32 [groups, tiles, tile_size]: numbers of the tokens, beyond the last where none is."""
    positions: Array
    """int32 [groups, tiles, tile_size]"""
    contexts: Array
    """int32 [groups, tiles]"""
    pages: Array
    """uint32 [groups, blocks, tiles, pages of a block]: where their contexts are."""
    blocks: Array
    """uint32 [groups]: how many there are; 0 for a group that holds nothing."""
    first: Array | None
    """uint32 [groups]: the first block to visit, behind which no window reaches; None: 0."""
    starts: Array | None
    """int32 [groups, tiles]: the first position that a tile's tokens see; None: 0."""


def paged_attention(
    q: Array,
    kv: Array,
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    window: int | None = None,
) -> Array:
    """See `reference.paged_attention`."""

    def read_layer(layer: Array) -> Read:
        return reader(kv, layer)

    return _attend(q, read_layer, layer, page_table, tiles, tile_size, kv.shape[4], window)


def attend_pages(
    q: Array,
    read: Read,
    page_table: Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    page_size: int,
    window: int | None = None,
) -> Array:
    """See `reference.attend_pages`."""
    return _attend(q, lambda layer: read, 0, page_table, tiles, tile_size, page_size, window)


def _attend(
    q: Array,
    read: Callable[[Array], Read],
    layer: int,
    page_table: Array,
    tiles: QueryTiles,
    tile_size: int,
    page_size: int,
    window: int | None,
) -> Array:
    """`attend_pages`, with what reads the pages of a layer."""
    out = jnp.zeros_like(q)
    parts = [(tiles, tile_size)]
    if tiles.decode_rows is not None:
        parts.append((tiles.decode_rows, 1))
    for part, size in parts:
        keys = _SINGLE_KEYS if size == 1 else _CHUNK_KEYS
        pages = max(1, min(keys // page_size, page_table.shape[1]))
        groups = _grouped(part, page_table, q.shape[0], size, page_size, pages, window)
        out = _add(out, q, read, layer, groups, pages * page_size, window)
    return out


def _grouped(
    tiles: QueryTiles,
    page_table: Array,
    num_tokens: int,
    tile_size: int,
    page_size: int,
    pages: int,
    window: int | None,
) -> _Groups:
    """Tiles of similar contexts together, in blocks of so many pages."""
    size = max(1, min(_TOKENS // tile_size, tiles.first.shape[0]))
    missing = -tiles.first.shape[0] % size
    first, length, slot, position = (jnp.pad(each, (0, missing)) for each in tiles[:4])
    contexts = jnp.where(length > 0, position + length, 0)
    if 1 < size < first.shape[0]:
        order = jnp.argsort(-contexts)
        first, length, slot, position, contexts = (
            each[order] for each in (first, length, slot, position, contexts)
        )
    tables = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))[slot]
    places = QueryTiles(first, length, slot, position)
    tokens, positions = tile_tokens(places, tile_size, num_tokens)
    contexts, block = contexts.reshape(-1, size), pages * page_size
    by_block = tables.reshape(contexts.shape[0], size, -1, pages).swapaxes(1, 2)
    starts = None if window is None else first_seen(places, window).reshape(-1, size)
    return _Groups(
        tokens=tokens.reshape(-1, size, tile_size).astype(jnp.uint32),
        positions=positions.reshape(-1, size, tile_size),
        contexts=contexts,
        pages=by_block.astype(jnp.uint32),
        blocks=lax.div(contexts.max(axis=1) + block - 1, block).astype(jnp.uint32),
        first=None if starts is None else lax.div(starts.min(axis=1), block).astype(jnp.uint32),
        starts=starts,
    )


def _add(
    out: Array,
    q: Array,
    read: Callable[[Array], Read],
    layer: int,
    groups: _Groups,
    block: int,
    window: int | None,
) -> Array:
    """`out` [tokens, q_heads, head_dim] with the results of the groups' tokens."""
    count, tiles, tile_size = groups.tokens.shape
    q_heads, head_dim = q.shape[1:]
    a_block = jax.eval_shape(lambda pages: read(pages[0, 0])(pages, 0), groups.pages[0, 0])
    kv_heads = a_block.shape[2]
    used = jnp.sum(groups.blocks > 0, dtype=jnp.uint32)
    each_layer = jnp.uint32(count + 1)  # a number more than groups, at which the loop ends

    def has_more(carry: tuple[Array, Array]) -> Array:
        return lax.rem(carry[0], each_layer) < used

    def attend(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        counter, out = carry
        number, read_pages = lax.rem(counter, each_layer), read(lax.div(counter, each_layer))
        tokens, positions, contexts, pages, blocks = (each[number] for each in groups[:5])
        queries = q.at[tokens].get(mode="clip")
        queries = queries.reshape(tiles, tile_size, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)

        def keys_or_values(index: Array, side: int) -> Array:
            found = read_pages(pages[index], side).astype(q.dtype)
            return found.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, block, head_dim)

        def visit(index: Array, carry: Softmax) -> Softmax:
            keys, values = keys_or_values(index, 0), keys_or_values(index, 1)
            scores = jnp.einsum(
                "nhgtd,nhkd->nhgtk", queries, keys, preferred_element_type=jnp.float32
            )
            key_position = index.astype(jnp.int32) * block + jnp.arange(block)
            visible = key_position <= positions[:, None, None, :, None]
            # What an earlier owner left past the end may be anything, even NaN: 0 * NaN is NaN.
            held = key_position < contexts[:, None]
            if window is not None and groups.starts is not None:
                # Nor may what is behind the window.
                visible &= key_position > positions[:, None, None, :, None] - window
                held &= key_position >= groups.starts[number][:, None]
            values = jnp.where(held[:, None, :, None], values, 0)
            return carry.add(jnp.where(visible, scores * head_dim**-0.5, -jnp.inf), values)

        start = Softmax.start(queries.shape)
        first = jnp.uint32(0) if groups.first is None else groups.first[number]
        total = lax.fori_loop(first, blocks, visit, start).total
        found = total.transpose(0, 3, 1, 2, 4).reshape(tiles, tile_size, q_heads, head_dim)
        return counter + 1, out.at[tokens].set(found.astype(q.dtype), mode="drop")

    return lax.while_loop(has_more, attend, (layer * each_layer, out))[1]
