"""The definition of attention over a KVarN cache, in plain JAX.

A query sees the keys and values of its own page and of the sequence's first page in full precision,
and decoded ones of the pages between. So the result does not depend on how a sequence is cut into
chunks.

A page is encoded in the step that fills it. Until then its tokens are in the slot's tail. The
tokens of the first page stay in the slot's sink as long as the sequence lives, and are never
encoded. A sequence that finds its beginning in the prefix cache computes them again
(`KVarN.own_tokens`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs.reference import HeadWeights, heads_of
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.codec import rotate
from jaxserve_kernels.kv_format.kvarn.layout import (
    SINK,
    TAIL,
    KVarNKV,
    decode_tiles,
    encode_tiles,
)
from jaxserve_kernels.paged_attention.reference import Softmax, first_seen, tile_tokens


def attend(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
) -> tuple[Array, KVarNKV]:
    """See `kv_format.attend`."""
    parts = heads_of(qkv, heads, tables, kv_heads=kv.raw.shape[3], eps=eps, dtype=dtype)
    q, k, v = (rotate(part) for part in parts)
    fresh = jnp.stack([k, v], axis=2).astype(kv.raw.dtype)  # [tokens, kv_heads, 2, head_dim]
    kv = encode_filled(kv, layer, fresh, step)
    out = attend_rotated(
        q, kv, layer, fresh, step, tile_size=tile_size, window=window, sinks=heads.sinks
    )
    out = rotate(out).astype(dtype)
    # The barrier makes the write depend on the read. Otherwise XLA copies all sinks and tails in
    # each layer.
    out, fresh = lax.optimization_barrier((out, fresh))
    return out, keep_raw(kv, layer, fresh, step)


def encode_filled(kv: KVarNKV, layer: int, fresh: Array, step: AttentionStep) -> KVarNKV:
    """Encodes all pages, except first ones, whose last token is in this step.

    A loop encodes one page at a time. Most steps fill none, and encoding a fixed number of tiles
    would dominate a step's cost.
    """
    tokens, group = step.positions.shape[0], kv.group
    filled = ((step.positions + 1) % group == 0) & (step.positions >= group)
    (lasts,) = jnp.nonzero(filled, size=tokens)

    def encode(number: Array, stores: tuple[Array, ...]) -> tuple[Array, ...]:
        last = lasts[number]
        before = jnp.full(1, group - 1)
        first, start = last - before, step.positions[last] - before
        tile = _raw_pages(kv, layer, fresh, step, first, step.slots[last][None], start)
        encoded = encode_tiles(tile, kv.value_bits)
        page = step.pages[last]
        pairs = zip(stores, encoded, strict=True)
        return tuple(store.at[layer, page].set(one[0]) for store, one in pairs)

    count = jnp.sum(filled, dtype=jnp.int32)
    stores = (kv.key_words, kv.value_words, kv.scales)
    key_words, value_words, scales = lax.fori_loop(0, count, encode, stores)
    return KVarNKV(key_words, value_words, scales, kv.raw)


def keep_raw(kv: KVarNKV, layer: int, fresh: Array, step: AttentionStep) -> KVarNKV:
    """Stores the step's tokens of first pages in sinks, and those of growing pages in tails."""
    group = kv.group
    slots = jnp.where(kept(step, group), step.slots, kv.raw.shape[1])
    tiles = jnp.where(step.positions < group, SINK, TAIL)
    place = kv.raw.at[layer, slots, tiles, :, :, step.positions % group]
    return kv._replace(raw=place.set(fresh, mode="drop"))


def kept(step: AttentionStep, group: int) -> Array:
    """Which of the step's tokens stay in full precision, bool [tokens]: those of a sequence's first
    page, and of the page in which the step ends."""
    page = step.positions // group
    following = jnp.arange(page.shape[0]) + group - step.positions % group
    return (page == 0) | ~_holds(step, following, step.slots, (page + 1) * group)


def attend_rotated(
    q: Array,
    kv: KVarNKV,
    layer: int,
    fresh: Array,
    step: AttentionStep,
    *,
    tile_size: int,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention in the rotated basis, float32 [tokens, q_heads, head_dim]."""
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, group, tiles = kv.raw.shape[3], kv.group, step.tiles.in_one_list()
    tokens, positions = tile_tokens(tiles, tile_size, num_tokens)
    queries = q.at[tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
    queries = queries.reshape(-1, tile_size, kv_heads, q_heads // kv_heads, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4)  # [tiles, kv_heads, group, tile, head_dim]
    row_page = positions // group
    real = positions < (tiles.position + tiles.length)[:, None]  # rows of a tile that hold a token

    def visit(page: Array, carry: Softmax) -> Softmax:
        where = step.page_table[tiles.slot, page]
        stores = (store[layer, where] for store in (kv.key_words, kv.value_words, kv.scales))
        packed = decode_tiles(*stores, value_bits=kv.value_bits)
        start = jnp.full_like(tiles.slot, page * group)
        first = tiles.first + start - tiles.position
        raw = _raw_pages(kv, layer, fresh, step, first, tiles.slot, start).astype(jnp.float32)
        in_full = (row_page == page) | (page == 0)
        key_position = start[:, None] + jnp.arange(group)
        carry = add(carry, packed, (row_page > page) & ~in_full, key_position)
        return add(carry, (raw[:, :, 0], raw[:, :, 1]), in_full, key_position)

    def add(carry: Softmax, block: tuple[Array, Array], rows: Array, positions_: Array) -> Softmax:
        keys, values = block  # [tiles, kv_heads, group, head_dim]
        scores = jnp.einsum("nhgtd,nhkd->nhgtk", queries, keys) * head_dim**-0.5
        seen = rows[:, :, None] & (positions_[:, None, :] <= positions[:, :, None])
        if window is not None:
            seen &= positions_[:, None, :] > positions[:, :, None] - window
        # Values that no query sees may be anything, even NaN from an earlier owner.
        used = (seen & real[:, :, None]).any(axis=1)
        values = jnp.where(used[:, None, :, None], values, 0)
        return carry.add(jnp.where(seen[:, None, None], scores, -jnp.inf), values)

    longest = jnp.max(jnp.where(tiles.length > 0, tiles.position + tiles.length, 0))
    pages = lax.div(longest + group - 1, group)
    before = 0 if window is None else lax.div(jnp.min(first_seen(tiles, window)), group)
    total = lax.fori_loop(before, pages, visit, Softmax.start(queries.shape, sinks)).total
    out = total.transpose(0, 3, 1, 2, 4).reshape(-1, tile_size, q_heads, head_dim)
    return jnp.zeros(q.shape, jnp.float32).at[tokens].set(out, mode="drop")


def _raw_pages(
    kv: KVarNKV,
    layer: int,
    fresh: Array,
    step: AttentionStep,
    first: Array,
    slots: Array,
    starts: Array,
) -> Array:
    """The page of each of `slots` [n] that begins at position `starts` [n]:
    [n, kv_heads, 2, group, head_dim].

    A position is read from this step's token `first` [n] + offset, if that is its token, else from
    the slot's sink or tail. Positions that nobody has written are undefined.
    """
    offsets = jnp.arange(kv.group)
    tokens = first[:, None] + offsets
    in_step = _holds(step, tokens, slots[:, None], starts[:, None] + offsets)
    here = fresh.at[jnp.where(in_step, tokens, 0)].get(mode="clip").transpose(0, 2, 3, 1, 4)
    kept = kv.raw[layer, slots, jnp.where(starts == 0, SINK, TAIL)]
    return jnp.where(in_step[:, None, None, :, None], here, kept)


def _holds(step: AttentionStep, tokens: Array, slots: Array, positions: Array) -> Array:
    """Whether the step's tokens with indices `tokens` have these slots and positions."""
    inside = (tokens >= 0) & (tokens < step.positions.shape[0])
    index = jnp.where(inside, tokens, 0)
    return inside & (step.slots[index] == slots) & (step.positions[index] == positions)
