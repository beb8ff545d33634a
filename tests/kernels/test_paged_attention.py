"""Paged attention gives each token the softmax over its own sequence, wherever its pages are."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_kernels.paged_attention import QueryTiles, attend_pages, paged_attention
from jaxserve_kernels.target import CPU, Implementation, Target
from tests.kernels.attention_inputs import (
    AttentionInputs,
    AttentionSpec,
    Chunk,
    Heads,
    apart,
    make_inputs,
)
from tests.kernels.attention_specs import SMALL_SPECS, WINDOW_SPECS

type Floats = NDArray[Any]

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
"""Largest absolute error against float64. Over five seeds of each spec the worst were 7e-7 and
9e-3 (the output of up to 2.5 rounds by 8e-3 at most in bfloat16, and the weights round too)."""

SPECS = SMALL_SPECS + WINDOW_SPECS
CHUNKED = AttentionSpec(
    name="chunked",
    chunks=(Chunk(0, 40),),
    heads=Heads(4, 2, 32),
    page_size=16,
    tile_size=8,
    pages_per_seq=3,
)

_NAMES = re.compile(r"%?\b[a-z_]+[\w.-]*\.\d+|%[\w.-]+|, metadata={[^}]*}")
"""Of instructions in XLA's text, and where they come from."""

type Attend = Callable[..., Floats]


@pytest.fixture(params=["reference", "cpu"], scope="module")
def attend(request: pytest.FixtureRequest) -> Attend:
    """The definition, and what is made for CPUs."""
    target = Target(implementation=request.param)

    def attend(
        q: Any,
        kv: Any,
        layer: int,
        page_table: Any,
        tiles: Any,
        tile_size: int,
        window: int | None = None,
        sinks: Floats | None = None,
    ) -> Floats:
        out = compiled(
            q, kv, layer, page_table, tiles, tile_size=tile_size, window=window, sinks=sinks
        )
        assert out.dtype == q.dtype
        return np.asarray(out, np.float64)

    compiled = jax.jit(
        partial(paged_attention, target=target), static_argnames=("layer", "tile_size", "window")
    )
    return attend


@pytest.fixture(scope="module")
def run(attend: Attend) -> Attend:
    def run(
        inputs: AttentionInputs,
        tile_size: int,
        window: int | None = None,
        sinks: Floats | None = None,
    ) -> Floats:
        arrays = [jnp.asarray(part) for part in inputs if not isinstance(part, int)]
        q, kv, page_table, *tiles = arrays
        return attend(q, kv, inputs.layer, page_table, QueryTiles(*tiles), tile_size, window, sinks)

    return run


def dense(
    inputs: AttentionInputs, window: int | None = None, sinks: Floats | None = None
) -> Floats:
    """Gather what each token sees, softmax in float64; 0 for tokens of no tile. A sink is one more
    score, whose weight is dropped."""
    q, kv = inputs.q.astype(np.float64), inputs.kv[inputs.layer]
    group = q.shape[1] // kv.shape[1]
    out = np.zeros_like(q)
    for first, length, slot, position in zip(
        inputs.first, inputs.length, inputs.slot, inputs.position, strict=True
    ):
        for token in range(first, first + length):
            context = position + token - first + 1
            seen = range(0 if window is None else max(context - window, 0), context)
            keys, values = _context(kv, inputs.page_table[slot], seen, group)
            scores = np.einsum("hd,khd->hk", q[token], keys) / np.sqrt(q.shape[-1])
            if sinks is not None:
                scores = np.concatenate([scores, sinks.astype(np.float64)[:, None]], axis=1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            weights = weights[:, : len(seen)]
            out[token] = np.einsum("hk,khd->hd", weights, values)
    return out


def _context(
    kv: Floats, table: NDArray[np.int32], seen: range, group: int
) -> tuple[Floats, Floats]:
    """Keys and values [positions, q_heads, head_dim] of a sequence."""
    page_size = kv.shape[3]
    places = [(table[p // page_size], p % page_size) for p in seen]
    both = np.stack([kv[page, :, :, offset] for page, offset in places]).astype(np.float64)
    return both[:, :, 0].repeat(group, axis=1), both[:, :, 1].repeat(group, axis=1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_token_gets_the_softmax_over_its_sequence(spec: AttentionSpec, run: Attend) -> None:
    inputs = make_inputs(spec, seed=0)
    np.testing.assert_allclose(
        run(inputs, spec.tile_size, spec.window),
        dense(inputs, spec.window),
        rtol=0,
        atol=TOLERANCE[spec.dtype],
    )


@pytest.mark.parametrize("spec", WINDOW_SPECS[:2] + SMALL_SPECS[:3], ids=lambda spec: spec.name)
def test_sinks_take_part_in_each_softmax(spec: AttentionSpec, run: Attend) -> None:
    inputs = make_inputs(spec, seed=0)
    sinks = 3 * np.random.default_rng(1).standard_normal(inputs.q.shape[1]).astype(np.float32)
    expected = dense(inputs, spec.window, sinks)
    got = run(inputs, spec.tile_size, spec.window, sinks)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[spec.dtype])
    assert np.abs(expected - dense(inputs, spec.window)).max() > 0.1


@pytest.mark.parametrize("split", range(1, 40, 3))
def test_a_prompt_in_two_chunks_gets_what_it_gets_at_once(split: int, run: Attend) -> None:
    inputs = make_inputs(CHUNKED, seed=1)
    whole = run(inputs, CHUNKED.tile_size)
    slot = inputs.slot[0]
    for start, end in ((0, split), (split, 40)):
        positions = np.arange(start, end, CHUNKED.tile_size, np.int32)
        tiles = inputs._replace(
            # Tokens of a chunk need not come first: these keep their places in q.
            first=_padded(positions, 5),
            position=_padded(positions, 5),
            length=_padded(np.minimum(end - positions, CHUNKED.tile_size), 5),
            slot=np.full(5, slot, np.int32),
        )
        part = run(tiles, CHUNKED.tile_size)
        np.testing.assert_allclose(
            part[start:end], whole[start:end], rtol=0, atol=TOLERANCE["float32"]
        )
        assert not part[:start].any() and not part[end:].any(), "wrote tokens of no tile"


def test_single_tokens_apart_from_chunks_get_what_they_get_among_them(
    attend: Attend, run: Attend
) -> None:
    spec = next(spec for spec in SMALL_SPECS if spec.name == "chunks_and_decodes_together")
    inputs = make_inputs(spec, seed=6)
    together = run(inputs, spec.tile_size)
    tiles = apart(inputs)
    assert tiles.decode_rows is not None and len(tiles.decode_rows.first) > 4
    for given in (tiles, tiles.in_one_list()):
        got = attend(inputs.q, inputs.kv, inputs.layer, inputs.page_table, given, 16)
        np.testing.assert_allclose(got, together, rtol=0, atol=TOLERANCE["float32"])


def test_the_order_of_tiles_and_the_places_of_pages_do_not_change_a_bit(run: Attend) -> None:
    inputs = make_inputs(CHUNKED, seed=2)
    rng = np.random.default_rng(3)
    order = rng.permutation(len(inputs.first))
    places = np.concatenate([[0], 1 + rng.permutation(inputs.kv.shape[1] - 1)])
    moved = np.empty_like(inputs.kv)
    moved[:, places] = inputs.kv
    shuffled = inputs._replace(
        kv=moved,
        page_table=places[inputs.page_table].astype(np.int32),
        first=inputs.first[order],
        length=inputs.length[order],
        slot=inputs.slot[order],
        position=inputs.position[order],
    )
    np.testing.assert_array_equal(run(shuffled, CHUNKED.tile_size), run(inputs, CHUNKED.tile_size))


def test_neighbours_in_the_step_do_not_change_a_bit(run: Attend) -> None:
    """The loop runs to the longest context of the step; short ones must not notice."""
    spec = next(spec for spec in SMALL_SPECS if spec.name == "decode_at_page_edges")
    inputs = make_inputs(spec, seed=4)
    together = run(inputs, 1)
    for index in range(len(spec.chunks)):
        alone = inputs._replace(length=np.where(np.arange(len(inputs.first)) == index, 1, 0))
        alone = alone._replace(length=alone.length.astype(np.int32))
        np.testing.assert_array_equal(run(alone, 1)[index], together[index])


def test_a_query_is_blind_to_later_positions_and_sees_all_before(run: Attend) -> None:
    inputs = make_inputs(CHUNKED, seed=5)
    before = run(inputs, CHUNKED.tile_size)
    for position in (0, 15, 16, 23, 39):
        kv = inputs.kv.copy()
        page = inputs.page_table[inputs.slot[0], position // CHUNKED.page_size]
        kv[inputs.layer, page, :, :, position % CHUNKED.page_size] += 1.0
        changed = (run(inputs._replace(kv=kv), CHUNKED.tile_size) != before).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, np.arange(40) >= position)


def test_on_a_cpu_only_pages_of_the_tiles_contexts_are_read() -> None:
    """The definition reads as many of each tile, places for tiles included, as the longest has."""
    chunks = (*(Chunk(length - 1, 1) for length in (1, 63, 64, 65, 1000)), Chunk(100, 30))
    spec = AttentionSpec(
        name="uneven", chunks=chunks, heads=Heads(4, 2, 32), page_size=16, tile_size=16,
        pages_per_seq=64, padding_tiles=40,
    )  # fmt: skip
    inputs = make_inputs(spec, seed=8)
    visits: list[tuple[int, ...]] = []

    def read(pages: jax.Array, side: int) -> jax.Array:
        jax.debug.callback(lambda: visits.append(pages.shape))
        return jnp.asarray(inputs.kv)[inputs.layer, pages, :, side]

    def pages_read(implementation: Implementation) -> int:
        visits.clear()
        target = Target(implementation=implementation)
        call = partial(attend_pages, read=read, tile_size=16, page_size=16, target=target)
        table = jnp.asarray(inputs.page_table)
        jax.block_until_ready(
            jax.jit(lambda q: call(q, page_table=table, tiles=apart(inputs)))(inputs.q)
        )
        jax.effects_barrier()
        return sum(tiles * pages for tiles, pages in visits) // 2

    held = sum(-(-(chunk.start + chunk.length) // 16) for chunk in chunks)
    assert pages_read("reference") > 30 * held
    # Single tokens come in groups of 16 places, which go as far as the longest of the group, four
    # pages at a time; the chunk has two tiles, of 116 and 130 tokens, and visits eight at a time.
    assert pages_read("cpu") == 16 * 64 + 8 + 16


def test_in_a_window_the_work_is_that_of_the_window() -> None:
    """Of sequences of 1,000 tokens, whose pages behind the window nobody may read."""
    chunks = tuple(Chunk(999, 1) for _ in range(16))
    spec = AttentionSpec(
        name="long", chunks=chunks, heads=Heads(4, 2, 32), page_size=16, tile_size=1, window=100
    )
    inputs = make_inputs(spec, seed=8)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)

    def blocks(implementation: Implementation) -> int:
        visits: list[int] = []

        def read(pages: jax.Array, side: int) -> jax.Array:
            jax.debug.callback(lambda: visits.append(pages.shape[1]))
            return jnp.asarray(inputs.kv)[inputs.layer, pages, :, side]

        target = Target(implementation=implementation)
        call = partial(
            attend_pages, read=read, tile_size=1, page_size=16, window=100, target=target
        )
        out = jax.jit(call)(jnp.asarray(inputs.q), page_table=inputs.page_table, tiles=tiles)
        assert np.isfinite(np.asarray(out)).all()
        jax.effects_barrier()
        return sum(visits) // 2

    assert 7 <= blocks("reference") <= 16
    assert 7 <= blocks("cpu") <= 12


def test_on_a_cpu_all_layers_share_their_kernels() -> None:
    """XLA compiles kernels that are the same only once; a layer's number must not be in them."""
    spec = SMALL_SPECS[0]
    inputs = make_inputs(spec, seed=9)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)

    def kernels(layers: int) -> set[str]:
        def attend(q: jax.Array, kv: jax.Array, table: jax.Array, tiles: QueryTiles) -> jax.Array:
            for layer in range(layers):
                q += paged_attention(
                    q, kv, layer, table, tiles, tile_size=spec.tile_size, target=CPU
                )
            return q

        kv = jnp.zeros((4, *inputs.kv.shape[1:]), inputs.q.dtype)
        lowered = jax.jit(attend).lower(inputs.q, kv, inputs.page_table, tiles)
        text = lowered.compile().as_text() or ""
        fused = re.findall(r"^%(?:fused|wrapped)[^{]*{.*?^}", text, re.MULTILINE | re.DOTALL)
        return {re.sub(_NAMES, "", each) for each in fused}

    assert len(kernels(4)) == len(kernels(3)) > 10


def _padded(values: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    return np.pad(values, (0, size - len(values))).astype(np.int32)
