"""Hopper's attention on the emulator: chunks, and single tokens with PDL, with every KV format."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.kv_format import attend, end_step, named
from jaxserve_kernels.paged_attention import QueryTiles, hopper, paged_attention, tile_tokens
from jaxserve_kernels.paged_attention import config as attention_config
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER, PDL
from tests.kernels.attention_inputs import AttentionSpec, Heads, apart, make_inputs
from tests.kernels.attention_specs import HOPPER_SPECS
from tests.kernels.kv_steps import AS_WRITTEN, EPS, LAYER, Sequences, without_what_is_behind

SPECS = [spec for spec in HOPPER_SPECS if spec.heads in (Heads(8, 2, 64), Heads(8, 2, 256))]


@pytest.mark.parametrize("split", [False, True], ids=["one_list", "decode_rows_apart"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_chunks(spec: AttentionSpec, split: bool) -> None:
    inputs = make_inputs(spec, seed=7)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)
    used = np.zeros(spec.num_tokens, bool)
    for first, length in zip(inputs.first, inputs.length, strict=True):
        used[first : first + length] = True

    def attended(dtype: Any, tiles: Any, target: Target) -> jax.Array:
        table, tiles = jax.tree.map(jnp.asarray, (inputs.page_table, tiles))
        q, kv = (jnp.asarray(each, dtype) for each in (inputs.q, inputs.kv))
        call = functools.partial(
            paged_attention, layer=inputs.layer, tile_size=spec.tile_size, target=target
        )
        return call(q, kv, page_table=table, tiles=tiles)

    expected = attended(jnp.float32, tiles, REFERENCE)
    out = attended(jnp.bfloat16, apart(inputs) if split else tiles, HOPPER)
    assert relative_error(out[used], expected[used]) < 4e-3


DECODE = ((0, 1, 63, 64, 127, 128, 300), (1,) * 7)
"""As many as compute their inputs in attention, whatever the format."""
ONE = ((1100,), (1,))
MANY = (tuple(range(0, 400, 20)), (1,) * 20)
CHUNKS = ((0, 0, 64, 100, 127, 255), (3, 200, 64, 29, 2, 1))
LONG = ((300, 57), (150, 130))
"""As in long steps, contexts are not split, and programs take several tiles, of which page ends cut
some."""
FEW = ((0, 70, 128), (1,) * 3)
SOME = ((0, 64, 65, 130, 1, 2, 3, 40), (1,) * 8)
"""More than the kernel for few tokens takes."""
SHORT = ((0, 100), (20, 29))
BEHIND = ((500, 64, 700), (80, 70, 1))
"""Chunks of which windows end within, and before."""
WORKS = {"decode": DECODE, "one": ONE, "many": MANY, "chunks": CHUNKS, "long": LONG}
OTHERS = {"few": FEW, "some": SOME, "short": SHORT, "behind": BEHIND}
FORMATS = ("auto", "int8", "fp8_e4m3", "kvarn_k4v4_g128", "kvarn_k4v2_g128")


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_keys_and_values(
    name: str, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_equals_the_definition(name, work, monkeypatch, options="norms", q_heads=8)


@pytest.mark.parametrize(
    ("name", "work", "window"),
    [
        *(("auto", work, window) for work in [*WORKS, "few", "behind"] for window in (1, 50, 128)),
        *((name, work, 50) for name in ("int8", "fp8_e4m3") for work in ("decode", "behind")),
        *((name, "chunks", 128) for name in ("int8", "fp8_e4m3")),
    ],
)
def test_windows(name: str, work: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention_equals_the_definition(
        name, work, monkeypatch, options="nothing", q_heads=8, window=window
    )


@pytest.mark.parametrize(("options", "q_heads"), [("nothing", 8), ("bias", 14), ("both", 14)])
@pytest.mark.parametrize(
    ("name", "work"),
    [
        *((name, "few") for name in FORMATS if name != "kvarn_k4v2_g128"),
        *(("auto", work) for work in ("some", "short")),
        *(("kvarn_k4v2_g128", work) for work in ("some", "short")),
        ("int8", "short"),
    ],
)
def test_heads_without_norms_and_with_a_bias(
    name: str, work: str, options: str, q_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama and Qwen2 have them, whose larger heads come in groups of seven."""
    attention_equals_the_definition(name, work, monkeypatch, options=options, q_heads=q_heads)


@pytest.mark.parametrize(
    ("name", "work", "window"),
    [
        *(("auto", work, None) for work in [*WORKS, "few", "some"]),
        *(("auto", work, 50) for work in ("decode", "few", "behind", "one")),
        *((name, work, 50) for name in ("int8", "fp8_e4m3") for work in ("decode", "behind")),
    ],
)
def test_sinks(name: str, work: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gpt-oss has them: each counts once, however a context is split."""
    attention_equals_the_definition(
        name, work, monkeypatch, options="sinks", q_heads=8, window=window
    )


@pytest.mark.parametrize("window", [None, 50])
def test_programs_take_several_tiles_of_split_contexts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tiles have four pages for three splits, so that the last split has none."""
    attention_equals_the_definition(
        "auto", "long", monkeypatch, options="nothing", q_heads=8, window=window, splits=3
    )


@pytest.mark.parametrize(("work", "splits"), [("chunks", 1), ("long", 1), ("long", 3)])
def test_heads_of_256(work: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3.5 has them. On Hopper, a block of keys is then half a page."""
    attention_equals_the_definition(
        "auto", work, monkeypatch, options="nothing", q_heads=16, head_dim=256, splits=splits
    )


def attention_equals_the_definition(
    name: str,
    work: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    options: str,
    q_heads: int,
    head_dim: int = 128,
    window: int | None = None,
    splits: int = 1,
) -> None:
    if work == "long":  # a program takes several tiles
        config = attention_config.HopperConfig(splits=splits, min_blocks=1)
        monkeypatch.setattr(attention_config, "hopper_heuristic", lambda **_: config)
        monkeypatch.setattr(hopper, "_MORE_TILES", -7)
        monkeypatch.setattr(hopper, "_MORE_SPLIT_TILES", -7)
    starts, counts = (WORKS | OTHERS)[work]
    ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
    tile_size = tile_tokens(q_heads // 2) if max(counts) > 1 else 1
    sequences = Sequences(
        lengths=ends, page_size=named(name).page_size or 64, dtype="bfloat16",
        q_heads=q_heads, kv_heads=2, head_dim=head_dim, options=options,
    )  # fmt: skip

    def both(qkv: Any, kv: Any, tables: Any, step: Any, tile_size: int, target: Target) -> Any:
        out, kv = attend(
            qkv,
            kv,
            LAYER,
            sequences.heads,
            tables,
            step,
            eps=EPS,
            tile_size=tile_size,
            dtype=sequences.dtype,
            window=window,
            target=target,
        )
        return out, end_step(kv, step, tile_size=tile_size, target=target)

    def reference(kv: Any, step: Any, tile_size: int, parts: int) -> Any:
        qkv, tables = sequences.projections(step, parts=parts)
        call = functools.partial(both, tile_size=tile_size, target=REFERENCE)
        return jax.jit(call, compiler_options=AS_WRITTEN)(qkv, kv, tables, step)

    kv = named(name).allocate(sequences.shape, "bfloat16")
    if any(starts):
        _, kv = reference(kv, sequences.step((0,) * len(starts), starts, 32), 32, 1)
    padding = 100 if work == "long" else 0
    step = sequences.step(starts, counts, tile_size, padding, apart=tile_size > 1)
    parts = 1 if tile_size > 1 else 4
    expected, _ = reference(kv, step, tile_size, parts)
    if window is not None:
        kv, step = without_what_is_behind(kv, step, starts, window, sequences.page_size)
    qkv, tables = sequences.projections(step, parts=parts)
    arrays = jax.tree.map(jnp.asarray, (tables, step))
    out, left = both(qkv, kv, *arrays, tile_size, HOPPER if tile_size > 1 else PDL)
    used = sum(counts)
    assert relative_error(out[:used], expected[:used]) < 6e-3
    for each in jax.tree.leaves(left):
        if window is None:
            assert np.isfinite(np.asarray(each, np.float32)).all()


@pytest.mark.parametrize("work", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_float32_queries_are_not_rounded_over_a_bfloat16_cache(work: Any) -> None:
    """Which alone would be an error of 1e-3: keys and values are rounded, nothing else is."""
    starts, counts = work
    ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
    tile_size = tile_tokens(4) if max(counts) > 1 else 1
    sequences = Sequences(lengths=ends, page_size=64, q_heads=8, kv_heads=2, head_dim=64)
    step = sequences.step(starts, counts, tile_size, apart=tile_size > 1)
    qkv, tables = sequences.projections(step)
    cache = named("bf16").allocate(sequences.shape, "float32")
    kv = jax.random.normal(jax.random.key(0), cache.shape, cache.dtype)

    def run(target: Target) -> tuple[jax.Array, jax.Array]:
        arrays = jax.tree.map(jnp.asarray, (sequences.heads, tables, step))
        return attend(
            qkv,
            kv,
            LAYER,
            *arrays,
            eps=EPS,
            tile_size=tile_size,
            dtype=sequences.dtype,
            target=target,
        )

    (out, left), (expected, kept) = run(HOPPER), run(REFERENCE)
    assert out.dtype == jnp.float32 and left.dtype == jnp.bfloat16
    assert relative_error(out[: sum(counts)], expected[: sum(counts)]) < 1e-4
    assert relative_error(left[LAYER, 1:], kept[LAYER, 1:]) < 1e-4


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_of_padding_alone_waits_for_the_kernels_before_it(name: str) -> None:
    """As the steps that are timed before a server is ready may be. The emulator sees to it."""
    sequences = Sequences(
        lengths=(1, 1), page_size=named(name).page_size or 64, dtype="bfloat16",
        q_heads=8, kv_heads=2, head_dim=128,
    )  # fmt: skip
    step = sequences.step((0, 0), (1, 1), 1)
    nothing = jnp.zeros_like(step.tiles.length)
    step = step._replace(
        slots=jnp.full_like(step.slots, 2),
        pages=jnp.zeros_like(step.pages),
        tiles=QueryTiles(nothing, nothing, jnp.full_like(nothing, 2), nothing),
    )
    kv = named(name).allocate(sequences.shape, "bfloat16")
    qkv, tables = sequences.projections(step, parts=4)
    attend(
        qkv,
        kv,
        LAYER,
        sequences.heads,
        tables,
        step,
        eps=EPS,
        tile_size=1,
        dtype=sequences.dtype,
        target=PDL,
    )
