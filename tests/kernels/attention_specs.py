"""Named shapes of paged attention: for tests and benchmarks."""

from __future__ import annotations

from jaxserve_kernels.paged_attention.config import tile_tokens
from tests.kernels.attention_inputs import AttentionSpec, Chunk, Heads


def _decode(*lengths: int) -> tuple[Chunk, ...]:
    """The last token of sequences of these lengths."""
    return tuple(Chunk(length - 1, 1) for length in lengths)


def _edges(page_size: int, most: int) -> tuple[int, ...]:
    """Lengths around the edges of pages and of the longest sequence."""
    return (1, page_size - 1, page_size, page_size + 1, 2 * page_size, most - 1, most)


_SMALL = Heads(4, 2, 32)
_QWEN3 = Heads(32, 8, 128)

SMALL_SPECS: tuple[AttentionSpec, ...] = (
    AttentionSpec(
        name="decode_at_page_edges",
        chunks=_decode(*_edges(4, 150)),
        page_size=4,
        tile_size=1,
        pages_per_seq=38,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="decode_at_page_edges_of_16_bfloat16",
        chunks=_decode(*_edges(16, 160)),
        page_size=16,
        tile_size=1,
        dtype="bfloat16",
        heads=_QWEN3,
    ),
    AttentionSpec(
        name="decode_at_page_edges_of_64_bfloat16",
        chunks=_decode(*_edges(64, 320)),
        page_size=64,
        tile_size=1,
        dtype="bfloat16",
        heads=_QWEN3,
    ),
    AttentionSpec(
        name="decode_at_block_edges",
        chunks=_decode(127, 128, 129, 255, 256, 257),
        page_size=16,
        tile_size=1,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="decode_with_pages_of_one_token",
        chunks=_decode(1, 2, 3, 130),
        page_size=1,
        tile_size=1,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="decode_with_one_head",
        chunks=_decode(1, 40),
        heads=Heads(1, 1, 64),
        page_size=16,
        tile_size=1,
    ),
    AttentionSpec(
        name="decode_without_grouping",
        chunks=_decode(5, 33),
        heads=Heads(8, 8, 64),
        page_size=16,
        tile_size=1,
    ),
    AttentionSpec(
        name="decode_padded",
        chunks=_decode(3, 70),
        page_size=16,
        tile_size=1,
        padding_tokens=6,
        padding_tiles=6,
        pages_per_seq=9,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="nothing_but_padding",
        chunks=(),
        page_size=16,
        tile_size=1,
        padding_tokens=4,
        padding_tiles=4,
        pages_per_seq=3,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="prefill_in_tiles_of_one",
        chunks=(Chunk(0, 9), Chunk(3, 4)),
        page_size=4,
        tile_size=1,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="prefill_that_ends_inside_a_tile",
        chunks=(Chunk(0, 37),),
        page_size=4,
        tile_size=16,
        padding_tokens=11,
        padding_tiles=2,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="prefill_that_fills_its_tiles",
        chunks=(Chunk(0, 32), Chunk(0, 8)),
        heads=Heads(8, 8, 32),
        page_size=16,
        tile_size=8,
    ),
    AttentionSpec(
        name="prefill_over_several_blocks",
        chunks=(Chunk(0, 300),),
        page_size=64,
        tile_size=16,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="later_chunks_at_page_and_tile_edges",
        chunks=(Chunk(3, 5), Chunk(4, 4), Chunk(5, 3), Chunk(15, 17), Chunk(130, 12)),
        page_size=4,
        tile_size=5,
        padding_tokens=3,
        padding_tiles=4,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="chunks_and_decodes_together",
        chunks=(*_decode(1, 16, 17, 90), Chunk(0, 21), Chunk(48, 33), Chunk(7, 1)),
        page_size=16,
        tile_size=16,
        padding_tokens=5,
        padding_tiles=6,
        pages_per_seq=10,
        heads=_SMALL,
    ),
    AttentionSpec(
        name="chunks_and_decodes_together_bfloat16",
        chunks=(*_decode(1, 64, 65, 200), Chunk(0, 40), Chunk(48, 33)),
        page_size=64,
        tile_size=16,
        dtype="bfloat16",
        padding_tokens=5,
        padding_tiles=3,
        heads=_QWEN3,
    ),
    AttentionSpec(
        name="prefill_with_64_wide_heads_bfloat16",
        chunks=(Chunk(0, 33), Chunk(20, 20)),
        heads=Heads(4, 2, 64),
        page_size=16,
        tile_size=16,
        dtype="bfloat16",
    ),
)
"""Every edge case, small enough for an exact reference on one core."""


def _windowed(
    name: str, window: int, *chunks: Chunk, page_size: int = 16, tile_size: int = 1
) -> AttentionSpec:
    return AttentionSpec(
        name=name,
        chunks=chunks,
        heads=_SMALL,
        page_size=page_size,
        tile_size=tile_size,
        padding_tokens=3,
        padding_tiles=2,
        window=window,
    )


WINDOW_SPECS: tuple[AttentionSpec, ...] = (
    _windowed("decode_in_a_window_of_one", 1, *_decode(1, 2, 16, 17, 150)),
    _windowed("decode_at_page_edges_of_a_window", 16, *_decode(1, 15, 16, 17, 31, 32, 33, 150)),
    _windowed("decode_at_block_edges_of_a_window", 128, *_decode(127, 128, 129, 255, 256, 257)),
    _windowed("decode_in_small_pages", 7, *_decode(6, 7, 8, 9, 64), page_size=4),
    _windowed(
        "chunks_across_the_window", 20, Chunk(0, 50), Chunk(19, 3), Chunk(90, 40), tile_size=8
    ),
    _windowed(
        "chunks_and_decodes_in_a_window",
        40,
        *_decode(1, 40, 41, 300),
        Chunk(0, 21),
        Chunk(250, 33),
        tile_size=16,
    ),
)
"""With a window, and what must not be read behind it."""


_EDGES = (
    *(Chunk(0, length) for length in (1, 33, 63, 64, 65)),
    *(Chunk(start, 1 + start % 300) for start in (5, 7, 31, 48, 63, 64, 127, 200, 960, 1000)),
)
_TAILS = (Chunk(3000, 17), Chunk(40, 3), Chunk(700, 12))
"""The ends of prompts whose beginnings are cached: few tiles, long contexts."""

_LAST_PAGES = (Chunk(1016, 20), Chunk(500, 30))
"""Of their contexts' last page, which a split of eight pages leaves to the next, some rows see
nothing."""

_SHORT = tuple(Chunk(37 * index % 300, 2 + index % 5) for index in range(100))
"""More tiles than the tokens would fill, so that programs take several."""

HOPPER_SPECS: tuple[AttentionSpec, ...] = tuple(
    AttentionSpec(
        name=f"{name}_of_{heads.q}x{heads.kv}x{heads.dim}",
        chunks=chunks,
        page_size=64,
        tile_size=tile_tokens(heads.q // heads.kv),
        dtype="bfloat16",
        padding_tokens=5,
        padding_tiles=7,
        heads=heads,
    )
    for heads in (
        *(_QWEN3, Heads(40, 8, 128), Heads(16, 8, 128), Heads(8, 1, 64), Heads(8, 2, 64)),
        *(Heads(8, 2, 256), Heads(16, 2, 256), Heads(24, 4, 256)),
    )
    for name, chunks in (
        ("edges", _EDGES),
        ("tails", _TAILS),
        ("last_pages", _LAST_PAGES),
        ("short", _SHORT),
    )
)
"""Around the edges of tiles and pages, for the kernel that takes only some shapes."""


def _qwen3_4b(name: str, chunks: tuple[Chunk, ...], tile_size: int) -> AttentionSpec:
    return AttentionSpec(
        name=f"qwen3_4b_{name}",
        chunks=chunks,
        page_size=64,
        tile_size=tile_size,
        dtype="bfloat16",
        heads=_QWEN3,
    )


MODEL_SPECS: tuple[AttentionSpec, ...] = (
    *(
        _qwen3_4b(f"decode_{rows}x{length}", _decode(*[length] * rows), 1)
        for rows, length in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 16384), (8, 16384))
    ),
    _qwen3_4b("decode_64_mixed", _decode(*range(64, 64 * 65, 64)), 1),
    _qwen3_4b("prefill_512", (Chunk(0, 512),), 32),
    _qwen3_4b("prefill_2048", (Chunk(0, 2048),), 32),
    _qwen3_4b("chunk_512_at_8192", (Chunk(8192, 512),), 32),
    _qwen3_4b("chunk_64_at_16320", (Chunk(16320, 64),), 32),
    _qwen3_4b("prefill_448_with_63_decodes", (*_decode(*[1024] * 63), Chunk(0, 448)), 32),
)
"""Shapes that serving meets, for GPUs."""
