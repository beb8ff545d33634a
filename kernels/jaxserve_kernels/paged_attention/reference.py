"""The definition of paged attention, in plain JAX with a streamed softmax.

Context lengths are data. The loop runs to the longest context of the step, so the work depends on
it, but no shape does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

_BLOCK_TOKENS = 128
"""Keys per iteration: enough for efficient products, yet few compared to a short context."""


class QueryTiles(NamedTuple):
    """Queries of a step in tiles: tile i is `length[i]` consecutive tokens of one sequence.

    All arrays are int32 [tiles]. Padding comes last. The order of the other tiles does not affect
    the result; those with long contexts should come first.
    """

    first: Array
    """Index of the tile's first token among the step's tokens."""
    length: Array
    """Tokens in the tile; 0 for a padding tile."""
    slot: Array
    """Row of the page table."""
    position: Array
    """Position of the tile's first token in its sequence."""
    decode_rows: QueryTiles | None = None
    """Decode rows of a step that also has chunks: tiles of at most one token. Another kernel may
    compute them. A kernel that wants a single list calls `in_one_list`."""

    def in_one_list(self) -> QueryTiles:
        """The decode rows after the other tiles. The padding of those is then in the middle, which
        suits kernels with a program for each tile."""
        if self.decode_rows is None:
            return self
        first, length, slot, position = (
            jnp.concatenate(each) for each in zip(self[:4], self.decode_rows[:4], strict=True)
        )
        return QueryTiles(first, length, slot, position)


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
    """Causal grouped-query attention of each token over its sequence's pages.

    A token at position p attends to positions 0..p, or with a window to the last `window` of them,
    as with Hugging Face's `sliding_window`: p - window + 1..p. Their keys and values are in the
    cache already (the step's own included). Scores are scaled by head_dim ** -0.5. For one token t
    of a tile::

        keys, values = pages of the tile's slot, positions 0..p     # [kv_heads, p + 1, head_dim]
        out[t, h] = softmax(q[t, h] @ keys[h // group].T * scale) @ values[h // group]

    Args:
      q: [tokens, q_heads, head_dim].
      kv: [layers, pages, kv_heads, 2, page_size, head_dim], keys then values on the axis of 2.
      layer: index into the first axis of kv.
      page_table: int32 [slots, pages_per_seq]. Entries past a sequence's end must be valid page
        numbers; the content of those pages does not matter.
      tiles: the query tiles.
      tile_size: the most tokens in a tile (`tiles.decode_rows` have at most one).
      sinks: [q_heads] or longer, unscaled scores that join the softmax of every token with a value
        vector of 0, so that a head may attend to nothing (gpt-oss, arXiv 2508.10925; Xiao et al.
        2023).
      window: number of keys that a token sees; None: all. Entries of pages before the windows of a
        tile must be valid page numbers too.

    Returns:
      [tokens, q_heads, head_dim] in q's dtype; 0 for tokens that belong to no tile.
    """

    read, page_size = reader(kv, layer), kv.shape[4]
    return attend_pages(
        q,
        read,
        page_table,
        tiles,
        tile_size=tile_size,
        page_size=page_size,
        window=window,
        sinks=sinks,
    )


type Read = Callable[[Array, int], Array]
"""Function of page numbers [tiles, pages] and a side, keys (0) or values (1). Returns those of the
pages, [tiles, pages, kv_heads, page_size, head_dim]."""


def reader(kv: Array, layer: ArrayLike) -> Read:
    """The `Read` function for one layer of a cache in the format of `paged_attention`."""
    return lambda pages, side: kv[layer, pages, :, side]


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
    """`paged_attention` over the pages that `read` returns."""
    tiles = tiles.in_one_list()
    num_tokens, q_heads, head_dim = q.shape
    pages_per_block = max(1, _BLOCK_TOKENS // page_size)
    block = pages_per_block * page_size
    tables = _padded_tables(page_table, tiles.slot, pages_per_block)
    tokens, positions = tile_tokens(tiles, tile_size, num_tokens)

    queries = q.at[tokens].get(mode="fill", fill_value=0)
    kv_heads = jax.eval_shape(lambda pages: read(pages, 0), tables[:, :1]).shape[2]
    queries = queries.reshape(-1, tile_size, kv_heads, q_heads // kv_heads, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4)  # [tiles, kv_heads, group, tile, head_dim]

    def attend_block(index: Array, carry: Softmax) -> Softmax:
        pages = lax.dynamic_slice_in_dim(tables, index * pages_per_block, pages_per_block, axis=1)
        # [tiles, pages, kv_heads, page, head_dim] to [tiles, kv_heads, block, head_dim]
        parts = (read(pages, side).astype(q.dtype).transpose(0, 2, 1, 3, 4) for side in (0, 1))
        keys, values = (part.reshape(-1, kv_heads, block, head_dim) for part in parts)
        scores = jnp.einsum("nhgtd,nhkd->nhgtk", queries, keys, preferred_element_type=jnp.float32)
        scores *= head_dim**-0.5
        key_position = index * block + jnp.arange(block)
        visible = key_position <= positions[:, None, None, :, None]
        # An earlier owner may have left NaN past the end, and 0 * NaN is NaN.
        held = key_position < (tiles.position + tiles.length)[:, None]
        if window is not None:  # the same holds for keys before the window
            visible &= key_position > positions[:, None, None, :, None] - window
            held &= key_position > tiles.position[:, None] - window
        values = jnp.where(held[:, None, :, None], values, 0)
        return carry.add(jnp.where(visible, scores, -jnp.inf), values)

    longest = jnp.max(jnp.where(tiles.length > 0, tiles.position + tiles.length, 0))
    start = Softmax.start(queries.shape, sinks)
    first = 0 if window is None else lax.div(jnp.min(first_seen(tiles, window)), block)
    result = lax.fori_loop(first, lax.div(longest + block - 1, block), attend_block, start)
    out = result.total.transpose(0, 3, 1, 2, 4).reshape(-1, tile_size, q_heads, head_dim)
    return jnp.zeros_like(q).at[tokens].set(out.astype(q.dtype), mode="drop")


class Softmax(NamedTuple):
    """A softmax-weighted sum over the blocks seen so far (Milakov and Gimelshein 2018)."""

    peak: Array  # float32 [..., tile]
    weight: Array  # float32 [..., tile]
    acc: Array  # float32 [..., tile, head_dim]

    @classmethod
    def start(cls, shape: tuple[int, ...], sinks: Array | None = None) -> Softmax:
        """The sum before any block, of shape [tiles, kv_heads, group, tile, head_dim]. It includes
        the sinks [q_heads], if given, with values of 0."""
        if sinks is None:
            lowest = jnp.full(shape[:-1], jnp.finfo(jnp.float32).min)
            return cls(lowest, jnp.zeros(shape[:-1]), jnp.zeros(shape))
        heads = shape[1] * shape[2]
        of_heads = sinks[:heads].astype(jnp.float32).reshape(shape[1], shape[2], 1)
        return cls(jnp.broadcast_to(of_heads, shape[:-1]), jnp.ones(shape[:-1]), jnp.zeros(shape))

    def add(self, scores: Array, values: Array) -> Softmax:
        """Adds a block: scores [tiles, kv_heads, group, tile, keys], and values [tiles, kv_heads,
        keys, head_dim]."""
        peak = jnp.maximum(self.peak, scores.max(-1))
        shrink = jnp.exp(self.peak - peak)
        probs = jnp.exp(scores - peak[..., None])
        acc = jnp.einsum(
            "nhgtk,nhkd->nhgtd",
            probs.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return Softmax(
            peak, self.weight * shrink + probs.sum(-1), self.acc * shrink[..., None] + acc
        )

    @property
    def total(self) -> Array:
        return self.acc / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)[..., None]


def _padded_tables(page_table: Array, slots: Array, pages_per_block: int) -> Array:
    """Page tables of the tiles, padded with page 0 to whole blocks: int32 [tiles, pages]."""
    tables = page_table[slots]
    missing = -tables.shape[1] % pages_per_block
    return jnp.pad(tables, ((0, 0), (0, missing)))


def first_seen(tiles: QueryTiles, window: int) -> Array:
    """The first position that each tile sees, int32 [tiles]; the largest int32 for padding
    tiles."""
    first = jnp.maximum(tiles.position - window + 1, 0)
    return jnp.where(tiles.length > 0, first, jnp.iinfo(jnp.int32).max)


def tile_tokens(tiles: QueryTiles, tile_size: int, num_tokens: int) -> tuple[Array, Array]:
    """Token indices (num_tokens where there is none) and positions, both int32 [tiles,
    tile_size]."""
    offset = jax.lax.iota(jnp.int32, tile_size)
    tokens = tiles.first[:, None] + offset
    tokens = jnp.where(offset < tiles.length[:, None], tokens, num_tokens)
    return tokens, tiles.position[:, None] + offset
