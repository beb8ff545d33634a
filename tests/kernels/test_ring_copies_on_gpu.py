"""Copies between caches and rings on a GPU, byte for byte as their definition, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.ring_copies import from_ring, reference, to_ring, within
from jaxserve_kernels.target import Target

pytestmark = pytest.mark.gpu

LAYERS, PAGES, SLOTS, PAGE = 36, 20, 18, (8, 2, 64, 128)


@pytest.mark.parametrize("moves", [1, 16])
def test_pages_of_a_model_go_to_the_ring_and_come_from_it(moves: int) -> None:
    rng = np.random.default_rng(moves)
    sizes = (LAYERS, PAGES, *PAGE), (SLOTS, LAYERS, *PAGE)
    pages, ring = (
        jnp.asarray(rng.standard_normal(each, np.float32), jnp.bfloat16) for each in sizes
    )
    pairs = np.stack([rng.permutation(PAGES)[:moves], rng.permutation(SLOTS)[:moves]])
    pairs = jnp.asarray(pairs, jnp.int32)
    for copy, definition, written in (
        (from_ring, reference.from_ring, 0),
        (to_ring, reference.to_ring, 1),
    ):
        expected = np.asarray(jax.jit(functools.partial(definition, axis=1))(pages, ring, pairs))
        copied = functools.partial(copy, axis=1, target=Target.here())
        own = (pages, ring)[written] + 0
        address = own.unsafe_buffer_pointer()
        arguments = (own, ring, pairs) if written == 0 else (pages, own, pairs)
        found = jax.jit(copied, donate_argnums=written)(*arguments)
        assert found.unsafe_buffer_pointer() == address, "the array has moved"
        np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("pair", [(2, 5), (5, 5)])
def test_a_slots_state_is_copied_in_place(pair: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.standard_normal((6, 9, 16, 128, 128), np.float32))
    expected = np.array(states)
    expected[:, pair[1]] = expected[:, pair[0]]
    address = states.unsafe_buffer_pointer()
    copied = functools.partial(within, axis=1, target=Target.here())
    found = jax.jit(copied, donate_argnums=0)(states, jnp.asarray(pair, jnp.int32))
    assert found.unsafe_buffer_pointer() == address, "the array has moved"
    np.testing.assert_array_equal(np.asarray(found), expected)
