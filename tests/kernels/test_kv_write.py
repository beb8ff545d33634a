"""Keys and values land at their page and offset, and nowhere else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_kernels.attention_inputs.reference import kv_write

LAYERS, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 3, 7, 2, 4, 8
SHAPE = (LAYERS, PAGES, KV_HEADS, 2, PAGE_SIZE, HEAD_DIM)

write = jax.jit(kv_write, static_argnames="layer")


def expected(
    kv: NDArray[Any],
    layer: int,
    keys: NDArray[Any],
    values: NDArray[Any],
    pages: NDArray[np.int32],
    offsets: NDArray[np.int32],
) -> NDArray[Any]:
    out = kv.copy()
    for token, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        out[layer, page, :, 0, offset] = keys[token]
        out[layer, page, :, 1, offset] = values[token]
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("tokens", [1, 5, 24])
def test_tokens_land_at_their_places_and_nothing_else_changes(
    tokens: int, layer: int, dtype: Any
) -> None:
    rng = np.random.default_rng(tokens)
    kv = rng.standard_normal(SHAPE, np.float32).astype(dtype)
    keys, values = rng.standard_normal((2, tokens, KV_HEADS, HEAD_DIM), np.float32).astype(dtype)
    places = rng.permutation(PAGES * PAGE_SIZE)[:tokens].astype(np.int32)
    pages, offsets = places // PAGE_SIZE, places % PAGE_SIZE
    result = write(kv, layer, keys, values, pages, offsets)
    np.testing.assert_array_equal(
        np.asarray(result), expected(kv, layer, keys, values, pages, offsets)
    )


def test_values_are_rounded_to_the_dtype_of_the_cache() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 1, KV_HEADS, HEAD_DIM), np.float32)
    kv, place = jnp.zeros(SHAPE, jnp.bfloat16), jnp.zeros(1, jnp.int32)
    result = write(kv, 0, jnp.asarray(keys), jnp.asarray(values), place, place)
    np.testing.assert_array_equal(np.asarray(result[0, 0, :, 0, 0]), keys[0].astype(jnp.bfloat16))


def test_padding_may_write_one_place_of_page_0_many_times() -> None:
    kv = jnp.zeros(SHAPE, jnp.float32)
    ones = jnp.ones((6, KV_HEADS, HEAD_DIM), jnp.float32)
    place = jnp.zeros(6, jnp.int32)
    result = np.asarray(write(kv, 1, ones, ones, place, place))
    assert (result[1, 0, :, :, 0] == 1).all()
    assert result.sum() == KV_HEADS * 2 * HEAD_DIM


def test_a_donated_cache_is_written_in_place() -> None:
    kv = jnp.zeros(SHAPE, jnp.float32)
    ones = jnp.ones((1, KV_HEADS, HEAD_DIM), jnp.float32)
    place = jnp.zeros(1, jnp.int32)
    in_place = jax.jit(kv_write, static_argnames="layer", donate_argnames="kv")
    compiled = in_place.lower(kv, 1, ones, ones, place, place).compile()
    address = kv.unsafe_buffer_pointer()
    result = compiled(kv, ones, ones, place, place)
    assert result.unsafe_buffer_pointer() == address
    assert compiled.memory_analysis().temp_size_in_bytes < kv.nbytes
