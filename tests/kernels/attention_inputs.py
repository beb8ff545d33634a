"""Steps' worth of paged attention: their shapes, and inputs of those shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve_kernels.paged_attention.reference import QueryTiles

type AnyArray = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

POISON = np.nan
"""What positions that must have no influence hold in place of keys and values."""

LAYER = 1
"""The layer that the inputs are of; layer 0 holds NaN."""


class Chunk(NamedTuple):
    """Consecutive queries of one sequence; the keys of all positions before are in the cache."""

    start: int
    """Position of the first query."""
    length: int


class Heads(NamedTuple):
    """What the model fixes."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One step's worth of attention. Chunk i belongs to a slot of its own."""

    name: str
    chunks: tuple[Chunk, ...]
    heads: Heads
    page_size: int
    tile_size: int
    dtype: str = "float32"
    pages_per_seq: int = 0
    """Width of the page table; 0: what the longest sequence needs."""
    padding_tokens: int = 0
    padding_tiles: int = 0
    idle_slots: int = 1
    """Slots without a chunk in this step."""
    window: int | None = None
    """Keys that a query sees; None: all."""

    def first_seen(self, chunk: Chunk) -> int:
        """The first position that a chunk's queries see."""
        return 0 if self.window is None else max(chunk.start - self.window + 1, 0)

    @property
    def width(self) -> int:
        longest = max((chunk.start + chunk.length for chunk in self.chunks), default=1)
        return self.pages_per_seq or _ceil_div(longest, self.page_size)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks) + self.padding_tokens

    @property
    def num_tiles(self) -> int:
        tiles = sum(_ceil_div(chunk.length, self.tile_size) for chunk in self.chunks)
        return tiles + self.padding_tiles


class AttentionInputs(NamedTuple):
    """Arguments of `paged_attention`, as numpy arrays."""

    q: AnyArray
    kv: AnyArray
    layer: int
    page_table: AnyArray
    first: AnyArray
    length: AnyArray
    slot: AnyArray
    position: AnyArray


def make_inputs(spec: AttentionSpec, seed: int) -> AttentionInputs:
    """Normal queries, keys and values; pages in random order; poison where nothing may be read.

    Positions past a sequence's end, or behind the window of its chunk, hold POISON in its own pages
    and in page 0; its unused table entries, those of pages wholly behind the window among them,
    name page 0 or pages of other sequences. So do pages that no table names, the other
    layer and the queries of the padding.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[spec.dtype]
    num_slots = len(spec.chunks) + spec.idle_slots
    slots = rng.permutation(num_slots)[: len(spec.chunks)]
    ends = [chunk.start + chunk.length for chunk in spec.chunks]
    needed = [_ceil_div(end, spec.page_size) for end in ends]
    pages = rng.permutation(np.arange(1, 2 + sum(needed)))  # the last one belongs to nobody

    stale = rng.choice([0, *pages[:-1]], (num_slots, spec.width))
    page_table = stale.astype(np.int32)
    shape = (2, 2 + sum(needed), spec.heads.kv, 2, spec.page_size, spec.heads.dim)
    kv = np.full(shape, np.nan, dtype)
    kv[LAYER, 0] = POISON
    taken = 0
    for chunk, slot, end, count in zip(spec.chunks, slots, ends, needed, strict=True):
        own = pages[taken : taken + count]
        behind, seen = divmod(spec.first_seen(chunk), spec.page_size)
        page_table[slot, behind:count] = own[behind:]
        normal = rng.standard_normal((count, *shape[2:]), np.float32).astype(dtype)
        if end % spec.page_size:
            normal[-1, :, :, end % spec.page_size :] = POISON
        normal[:behind] = normal[behind, :, :, :seen] = POISON
        kv[LAYER, own] = normal
        taken += count
    q = rng.standard_normal((spec.num_tokens, spec.heads.q, spec.heads.dim), np.float32)
    q[spec.num_tokens - spec.padding_tokens :] = np.nan
    return AttentionInputs(q.astype(dtype), kv, LAYER, page_table, *_tiles(spec, slots, num_slots))


def apart(inputs: AttentionInputs) -> QueryTiles:
    """The tiles, those of at most one token apart from the others, if there are any."""
    alone = inputs.length <= 1
    columns: list[Any] = [inputs.first, inputs.length, inputs.slot, inputs.position]
    decode_rows = QueryTiles(*(column[alone] for column in columns)) if alone.any() else None
    return QueryTiles(*(column[~alone] for column in columns), decode_rows=decode_rows)


def _tiles(spec: AttentionSpec, slots: AnyArray, num_slots: int) -> Iterator[AnyArray]:
    """first, length, slot and position of the tiles; those of the padding at the end."""
    rows: list[tuple[int, int, int, int]] = []
    token = 0
    for chunk, slot in zip(spec.chunks, slots, strict=True):
        for offset in range(0, chunk.length, spec.tile_size):
            length = min(spec.tile_size, chunk.length - offset)
            rows.append((token + offset, length, int(slot), chunk.start + offset))
        token += chunk.length
    rows += [(0, 0, num_slots - 1, 0)] * spec.padding_tiles
    yield from np.array(rows, np.int32).reshape(-1, 4).T


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)
