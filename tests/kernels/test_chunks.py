"""Tiles of queries that are cut where a page ends: the same queries, each in one page."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve_kernels.kv_format.chunks import cut_at_pages
from jaxserve_kernels.paged_attention import QueryTiles

PAGE, TILE = 8, 4
ROWS = 24
"""Tiles of a step: at least one is padding."""

chunks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=4)
"""Position of the first token, and how many."""


@given(chunks)
def test_tiles_are_cut_and_padding_comes_last(sequences: list[tuple[int, int]]) -> None:
    rows, first = [], 0
    for slot, (start, count) in enumerate(sequences):
        for offset in range(0, count, TILE):
            rows.append((first + offset, min(TILE, count - offset), slot, start + offset))
        first += count
    rows += [(0, 0, len(sequences), 0)] * (ROWS - len(rows))
    cut = cut_at_pages(QueryTiles(*np.array(rows, np.int32).T), PAGE)
    parts = list(zip(*(np.asarray(column).tolist() for column in cut[:4]), strict=True))

    lengths = [length for _, length, _, _ in parts]
    used = sum(length > 0 for length in lengths)
    assert not any(lengths[used:]), "attention ends at the first tile without a token"
    assert all(position % PAGE + length <= PAGE for _, length, _, position in parts[:used])
    assert queries(parts) == queries(rows)


def queries(tiles: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    """Token, slot and position of each."""
    return sorted(
        (first + offset, slot, position + offset)
        for first, length, slot, position in tiles
        for offset in range(length)
    )
