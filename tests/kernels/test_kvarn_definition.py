"""KVarN's codec against NumPy written from its definition (arXiv 2606.03458), in float64.

Bounds of errors alone say little: a codec that forgets a pass, or takes the wrong one of several
states, is within most of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_kernels.attention_inputs.reference import heads_of
from jaxserve_kernels.kv_format.kvarn import codec
from tests.kernels.kv_steps import AS_WRITTEN, EPS, Sequences

type Tile = NDArray[np.float64]

SIZE = 128
TILES = 6
KINDS = ("plain", "loud and quiet tokens", "channels off zero", "huge")


def tiles(kind: str) -> NDArray[np.float32]:
    """[tiles, tokens, channels], rotated."""
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.standard_normal((TILES, SIZE, SIZE))
    match kind:
        case "loud and quiet tokens":
            x *= rng.choice([8.0, 1.0, 1 / 8], (TILES, SIZE, 1), p=[0.05, 0.9, 0.05])
        case "channels off zero":
            for tile in x:
                chosen = rng.choice(SIZE, 4, replace=False)
                tile[:, chosen] = 4 * tile[:, chosen] + rng.choice([-20, 20], 4)
        case "huge":
            x *= 3e4
        case _:
            pass
    matrix = np.ones((1, 1))
    for _ in range(SIZE.bit_length() - 1):
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return np.asarray(x @ matrix / np.sqrt(SIZE), np.float32)


class Record(NamedTuple):
    """Of one tile [rows, columns]."""

    codes: NDArray[np.int64]
    row_scale: NDArray[np.float16]
    row_zero: NDArray[np.float16]
    column_scale: NDArray[np.float16]

    def decoded(self) -> Tile:
        scale, zero, column = (part.astype(np.float64) for part in self[1:])
        return (self.codes * scale[:, None] + zero[:, None]) * column


def defined(tile: Tile, bits: int, passes: int, floor: float) -> Record:
    """What the paper's code makes of a tile: the most balanced of all states, the last on a tie."""

    def ratio(stds: Tile) -> float:
        return stds.max() / max(stds.min(), 1e-8)

    row, column = np.zeros(len(tile)), np.zeros(tile.shape[1])  # logarithms of the scales
    states: list[tuple[float, Tile, Tile]] = []

    def divided() -> Tile:
        return tile / np.exp(row)[:, None] / np.exp(column)

    def remember() -> None:
        now = divided()
        found = ratio(now.std(0, ddof=1)) + ratio(now.std(1, ddof=1))
        states.append((found, row.copy(), column.copy()))

    remember()
    for _ in range(passes):
        column = np.clip(column + np.log(divided().std(0, ddof=1).clip(1e-3, 1e3)), floor, 10)
        row = np.clip(row + np.log(divided().std(1, ddof=1).clip(1e-3, 1e3)), floor, 10)
        remember()
    _, row, column = min(reversed(states), key=lambda state: state[0])
    balanced, levels = divided(), 2**bits - 1
    low = balanced.min(1)
    step = np.maximum((balanced.max(1) - low) / levels, 1e-10)
    codes = np.rint((balanced - low[:, None]) / step[:, None]).clip(0, levels)
    scales = (np.exp(row) * step, np.exp(row) * low, np.exp(column))
    return Record(codes.astype(np.int64), *(part.astype(np.float16) for part in scales))


def check(got: codec.Coded, expected: list[Record], *, ties: float) -> None:
    """At most `ties` of the codes may be a neighbour's: float32 rounds what lies between two."""
    codes = np.asarray(got.codes, np.int64)
    off = np.abs(codes - np.stack([record.codes for record in expected]))
    assert off.max(initial=0) <= 1 and off.mean() <= ties
    for number, record in enumerate(expected):
        scales = zip(got[1:], record[1:], strict=True)
        for part, right in scales:  # the neighbouring float16 number, at most
            np.testing.assert_allclose(
                np.asarray(part[number], np.float64), right.astype(np.float64), rtol=2**-10
            )
    decoded = np.asarray(codec.decode(got), np.float64)
    right = np.stack([record.decoded() for record in expected])
    assert np.linalg.norm(decoded - right) <= 2e-3 * np.linalg.norm(right)


encode_keys = jax.jit(codec.encode_keys)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_become_what_the_definition_says(kind: str) -> None:
    """Their rows are channels, their columns tokens."""
    x = tiles(kind)
    rows = np.swapaxes(x, 1, 2).astype(np.float64)
    make = partial(defined, bits=4, passes=codec.KEY_ITERATIONS, floor=codec.KEY_FLOOR)
    check(encode_keys(jnp.asarray(x)), [make(tile) for tile in rows], ties=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4])
def test_values_become_what_the_definition_says(kind: str, bits: int) -> None:
    """Their rows are tokens, their columns channels."""
    x = tiles(kind)
    make = partial(defined, bits=bits, passes=codec.VALUE_ITERATIONS, floor=codec.VALUE_FLOOR)
    encode: Any = jax.jit(partial(codec.encode_values, bits=bits))
    check(encode(jnp.asarray(x)), [make(tile) for tile in x.astype(np.float64)], ties=1e-4)


def test_some_tiles_are_most_balanced_before_the_last_pass() -> None:
    """Else nothing here would tell the best state from the last one."""
    x = tiles("channels off zero").astype(np.float64)
    best = [defined(tile, 4, codec.VALUE_ITERATIONS, codec.VALUE_FLOOR) for tile in x]
    fewer = [defined(tile, 4, codec.VALUE_ITERATIONS - 1, codec.VALUE_FLOOR) for tile in x]
    same = [(a.column_scale == b.column_scale).all() for a, b in zip(best, fewer, strict=True)]
    assert any(same)


def test_keys_are_rounded_where_the_definition_rounds_however_many_tokens_there_are() -> None:
    """As tests compile it, against float64 that is rounded to bfloat16 after the norm, after its
    weight, after RoPE and after the rotation.

    A rounding that is left out moves more than half of the elements to a neighbour, and 1.2 % of
    their codes: with `xla_allow_excess_precision` alone 57 % here, of 300 tokens none. What float32
    rounds on the way moves 4 of 10,000.
    """
    tokens = 1200
    sequences = Sequences(
        lengths=(tokens,), page_size=SIZE, dtype="bfloat16", q_heads=8, kv_heads=8, head_dim=SIZE
    )
    step = sequences.step((0,), (tokens,), 24)
    qkv, tables = sequences.projections(step)

    def keys(qkv: Any, tables: Any) -> Any:
        _, keys, _ = heads_of(
            qkv, sequences.heads, tables, kv_heads=8, eps=EPS, dtype=sequences.dtype
        )
        return codec.rotate(keys)

    got = jax.jit(keys, compiler_options=AS_WRITTEN)(qkv, tables)
    wide = np.asarray(qkv[0], np.float64).reshape(tokens, -1, SIZE)[:, 8:16]
    cos, sin = (np.asarray(table, np.float64)[:, None] for table in tables)
    weight = np.asarray(sequences.heads.k_norm, np.float64)
    wide = rounded(wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS))
    first, second = np.split(rounded(wide * weight), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    expected = rounded(rounded(np.concatenate(turned, axis=-1)) @ codec.hadamard(SIZE))
    assert np.mean(np.asarray(got, np.float64) != expected) < 2e-3


def rounded(x: Tile) -> Tile:
    """To bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)
