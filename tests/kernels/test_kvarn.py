"""KVarN's codec within its bounds, its words without loss, and its attention tile by tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_kernels.kv_format import attend
from jaxserve_kernels.kv_format.kvarn import KVarN, codec, layout
from jaxserve_kernels.target import CPU
from tests.kernels.kv_steps import EPS, LAYER, Sequences

type Floats = NDArray[np.floating[Any]]

GROUP = DIM = 128
encode_keys = jax.jit(codec.encode_keys)
encode_values = jax.jit(codec.encode_values, static_argnames="bits")
decode = jax.jit(codec.decode)
encode_tiles = jax.jit(layout.encode_tiles, static_argnums=1)
decode_tiles = jax.jit(layout.decode_tiles, static_argnames="value_bits")


def tiles(kind: str, count: int = 8) -> NDArray[np.float32]:
    """[count, tokens, channels] as keys and values come: plain, or with what makes them hard."""
    rng = np.random.default_rng(len(kind))
    x = rng.standard_normal((count, GROUP, DIM), np.float32)
    if "channels" in kind:  # a few far off zero
        for tile in x:
            chosen = rng.choice(DIM, 4, replace=False)
            tile[:, chosen] = tile[:, chosen] * 4 + rng.choice([-20, 20], 4)
    if "tokens" in kind:  # some loud, some quiet
        x *= np.exp(0.6 * rng.standard_normal((count, GROUP, 1), np.float32))
    return x


def relative_error(got: Any, expected: Floats) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_the_rotation_is_its_own_inverse_and_keeps_products() -> None:
    x, y = tiles("plain", 2)
    np.testing.assert_allclose(codec.rotate(codec.rotate(jnp.asarray(x))), x, atol=1e-5)
    product = codec.rotate(jnp.asarray(x)) @ codec.rotate(jnp.asarray(y)).T
    np.testing.assert_allclose(product, x @ y.T, atol=1e-4)


def test_scales_lie_in_pairs_that_are_used_together() -> None:
    scales = layout.Scales(*(jnp.arange(n) + 100 * i for i, n in enumerate((8, 8, 8, 4, 4, 4))))
    joined = layout.join_scales(scales)
    pairs = joined.reshape(-1, 2).tolist()
    assert pairs[:2] == [[0, 100], [1, 101]], "a channel's scale and zero"
    assert pairs[8] == [200, 204], "columns half a head apart"
    assert pairs[12] == [300, 302], "columns half a tile apart"
    assert pairs[-1] == [403, 503], "a token's scale and zero"
    for got, expected in zip(layout.split_scales(joined, 8), scales, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["plain", "channels", "tokens", "channels and tokens"])
@pytest.mark.parametrize("bits", [2, 4])
def test_no_element_is_off_by_more_than_half_a_step(kind: str, bits: int) -> None:
    """And what rounding the scales to float16 adds, by the published bound."""
    x = np.asarray(codec.rotate(jnp.asarray(tiles(kind))))
    coded = encode_values(x, bits=bits)
    error = np.abs(np.asarray(decode(coded)) - x)
    scale, zero, column = (np.asarray(part, np.float64) for part in coded[1:])
    step = scale[..., None] * column[..., None, :]
    bound = 0.5 * step * 1.002 + (2**bits - 1) * step * 1.1e-3
    bound += np.abs(zero[..., None] * column[..., None, :]) * 1.1e-3 + 1e-6
    assert (error <= bound).all()


@pytest.mark.parametrize(
    ("kind", "most"),
    [("plain", 0.105), ("channels", 0.035), ("tokens", 0.105), ("channels and tokens", 0.035)],
)
def test_keys_keep_their_accuracy_whatever_channels_and_tokens_do(kind: str, most: float) -> None:
    """The reference's figures are .099 and .032; per-token rounding in 4 bits has .10 and .22."""
    x = tiles(kind)
    rotated = codec.rotate(jnp.asarray(x))
    got = np.swapaxes(np.asarray(decode(encode_keys(rotated))), -1, -2)
    assert relative_error(codec.rotate(jnp.asarray(got)), x) < most
    # Tokens 20 times quieter than others are as accurate: scales have no floor.
    quiet = encode_keys(rotated * 0.05)
    small = np.swapaxes(np.asarray(decode(quiet)), -1, -2)
    assert relative_error(small, np.asarray(rotated) * 0.05) < most * 1.02


def test_two_bits_for_values_cost_half_of_the_signal() -> None:
    """In closed form .500 for normal numbers in groups of 128."""
    x = np.asarray(codec.rotate(jnp.asarray(tiles("plain"))))
    assert 0.48 < relative_error(decode(encode_values(x, bits=2)), x) < 0.52


@pytest.mark.parametrize("value", [0.0, 3.0, 3e4])
def test_tiles_without_variance_and_huge_ones_stay_finite(value: float) -> None:
    x = np.full((1, GROUP, DIM), value, np.float32)
    if value == 3e4:
        x = tiles("plain", 1) * np.float32(value)
    for coded in (encode_keys(jnp.asarray(x)), encode_values(jnp.asarray(x), bits=2)):
        assert all(np.isfinite(np.asarray(part, np.float32)).all() for part in coded[1:])
    if value != 3e4:
        assert np.abs(decode(encode_keys(jnp.asarray(x))) - value).max() < 4e-3


@pytest.mark.parametrize("bits", [2, 4])
def test_words_give_back_their_codes(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 16, 64)).astype(np.uint8)
    words = layout.pack(jnp.asarray(codes), bits)
    assert words.shape == (3, 16 * bits // 4, 16) and words.dtype == jnp.int16
    np.testing.assert_array_equal(layout.unpack(words, bits), codes)


@pytest.mark.parametrize("value_bits", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_sees_codes_between_the_sink_and_the_tail(value_bits: int) -> None:
    """One query after another against a dense softmax over what each may see."""
    sequences = Sequences(lengths=(30,), page_size=8, q_heads=2, kv_heads=1, head_dim=8)
    kv = KVarN(value_bits=value_bits, group=8).allocate(sequences.shape, jnp.float32)
    run: Any = jax.jit(
        partial(attend, layer=LAYER, eps=EPS, tile_size=4, dtype=sequences.dtype, target=CPU)
    )
    step = sequences.step((0,), (30,), 4)
    qkv, tables = sequences.projections(step)
    out, kv = run(qkv, kv, heads=sequences.heads, tables=tables, step=step)
    from jaxserve_kernels.attention_inputs.reference import heads_of

    q, k, v = (
        np.asarray(codec.rotate(part))
        for part in heads_of(
            qkv, sequences.heads, tables, kv_heads=1, eps=EPS, dtype=sequences.dtype
        )
    )
    pages = sequences.page_table[0]
    stores = (np.asarray(store[LAYER, pages, 0]) for store in kv[:3])
    coded = decode_tiles(*map(jnp.asarray, stores), value_bits=value_bits)
    coded_k, coded_v = (np.asarray(part).reshape(-1, 8) for part in coded)
    tiles = np.stack([part[8:24, 0].reshape(2, 8, 8) for part in (k, v)], axis=1)
    right = decode_tiles(*encode_tiles(jnp.asarray(tiles), value_bits), value_bits)
    for got, expected in zip((coded_k, coded_v), right, strict=True):
        np.testing.assert_allclose(got[8:24], expected.reshape(16, 8), rtol=0, atol=1e-2)
    for position in range(30):
        seen = np.arange(position + 1)
        full = ((seen // 8 == position // 8) | (seen < 8))[:, None]
        keys = np.where(full, k[seen, 0], coded_k[seen])
        values = np.where(full, v[seen, 0], coded_v[seen])
        scores = q[position] @ keys.T / np.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = codec.rotate(jnp.asarray(weights / weights.sum(-1, keepdims=True) @ values))
        np.testing.assert_allclose(out[position], expected, rtol=0, atol=5e-6)


def test_no_token_depends_on_where_its_sequence_was_cut() -> None:
    """Two sequences fill all slots and pages of a cache in which an earlier owner left NaN; they
    are cut at every token in turn, and at last computed token by token."""
    length, group = 27, 8
    sequences = Sequences(lengths=(length, length), page_size=group, head_dim=8)
    empty = KVarN(value_bits=2, group=group).allocate(sequences.shape, jnp.float32)
    stale = empty._replace(
        scales=jnp.full_like(empty.scales, jnp.nan), raw=jnp.full_like(empty.raw, jnp.nan)
    )
    run: Any = jax.jit(
        partial(attend, layer=LAYER, eps=EPS, tile_size=1, dtype=sequences.dtype, target=CPU)
    )

    def compute(kv: Any, starts: tuple[int, int], counts: tuple[int, int]) -> tuple[Any, Any]:
        """Of each sequence, what its tokens get; and the cache. As many tokens in every step."""
        step = sequences.step(starts, counts, 1, padding=2 * length - sum(counts) + 2)
        qkv, tables = sequences.projections(step)
        out, kv = run(qkv, kv, heads=sequences.heads, tables=tables, step=step)
        return np.split(np.asarray(out[: sum(counts)]), counts[:1]), kv

    whole, filled = compute(stale, (0, 0), (length, length))
    assert np.isfinite(whole).all()
    pages = sequences.page_table[:-1, 1 : length // group].reshape(-1)

    def check(kv: Any) -> None:
        """The pages behind the first one are the same codes."""
        for store, expected in zip(kv[:3], filled[:3], strict=True):
            np.testing.assert_array_equal(store[LAYER, pages], expected[LAYER, pages])

    for cut in range(1, length):
        cuts = (cut, length - cut)
        early, kv = compute(stale, (0, 0), cuts)
        late, kv = compute(kv, cuts, cuts[::-1])
        for parts, expected in zip(zip(early, late, strict=True), whole, strict=True):
            np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=5e-6)
        check(kv)
    kv = stale
    for position in range(length):
        out, kv = compute(kv, (position, position), (1, 1))
        for part, expected in zip(out, whole, strict=True):
            np.testing.assert_allclose(part[0], expected[position], rtol=0, atol=5e-6)
    check(kv)


def test_places_of_a_tile_without_a_token_see_no_codes() -> None:
    """They lie behind the page that the tile's token is in, of which an earlier owner left NaN."""
    length, group, tile_size = 14, 8, 12
    sequences = Sequences(lengths=(2 * group,), page_size=group, head_dim=8)
    empty = KVarN(value_bits=2, group=group).allocate(sequences.shape, jnp.float32)
    stale = empty._replace(
        scales=jnp.full_like(empty.scales, jnp.nan), raw=jnp.full_like(empty.raw, jnp.nan)
    )
    step = sequences.step((0,), (length,), tile_size)
    qkv, tables = sequences.projections(step)
    run: Any = jax.jit(
        partial(
            attend, layer=LAYER, eps=EPS, tile_size=tile_size, dtype=sequences.dtype, target=CPU
        )
    )
    out, _ = run(qkv, stale, heads=sequences.heads, tables=tables, step=step)
    assert np.isfinite(out[:length]).all()


def test_a_sequence_that_shares_pages_but_computes_the_first_one_gets_what_it_gets_alone() -> None:
    sequences = Sequences(lengths=(20, 20), page_size=4, head_dim=8)
    kv = KVarN(value_bits=4, group=4).allocate(sequences.shape, jnp.float32)
    run: Any = jax.jit(
        partial(attend, layer=LAYER, eps=EPS, tile_size=1, dtype=sequences.dtype, target=CPU)
    )

    def compute(kv: Any, starts: tuple[int, int], counts: tuple[int, int], table: Any) -> Any:
        """Both sequences have the same tokens. As many in every step."""
        step = sequences.step(starts, counts, 1, padding=18 - sum(counts))
        qkv, tables = sequences.projections(step._replace(slots=jnp.zeros_like(step.slots)))
        pages = table[np.asarray(step.slots), np.asarray(step.positions) // 4]
        step = step._replace(page_table=jnp.asarray(table), pages=jnp.asarray(pages))
        return run(qkv, kv, heads=sequences.heads, tables=tables, step=step)

    table = np.array(sequences.page_table)
    alone, _ = compute(kv, (0, 0), (0, 18), table)
    _, kv = compute(kv, (0, 0), (12, 0), table)
    table[1, :3] = table[0, :3]
    # Nobody reads the codes of a first page, nor what an earlier owner of the slot left.
    kv = kv._replace(
        raw=kv.raw.at[:, 1].set(jnp.nan), scales=kv.scales.at[:, table[0, 0]].set(jnp.nan)
    )
    _, kv = compute(kv, (0, 0), (0, 4), table)
    out, _ = compute(kv, (0, 12), (0, 6), table)
    np.testing.assert_allclose(out[:6], alone[12:18], rtol=0, atol=2e-5)
