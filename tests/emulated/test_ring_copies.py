"""Copies between caches and rings, and within an array, on the emulator, byte for byte as their
definition."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.ring_copies import reference, triton
from tests.emulator.targets import HOPPER

SHAPES = {
    "layers in front": ((3, 7, 2, 2, 4, 24), 1),
    "more than a program copies": ((2, 5, 9000), 1),
    "pages in front": ((6, 5, 3), 0),
    "of a number": ((2, 4), 1),
}
"""An array with pages, and their axis."""


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_between_pages_and_a_ring(shape: str, dtype: str) -> None:
    (sizes, axis), slots = SHAPES[shape], 5
    rng = np.random.default_rng(0)
    rest = (*sizes[:axis], *sizes[axis + 1 :])
    pages, ring = (
        jnp.asarray(rng.integers(0, 200, each), dtype) for each in (sizes, (slots, *rest))
    )
    pairs = jnp.asarray([[3, 1, 2], [4, 0, 2]], jnp.int32)
    for name in ("from_ring", "to_ring"):
        found = getattr(triton, name)(pages, ring, pairs, axis=axis, target=HOPPER)
        expected = getattr(reference, name)(pages, ring, pairs, axis=axis)
        np.testing.assert_array_equal(found, expected)
        assert not np.array_equal(found, pages if name == "from_ring" else ring)
    for pair in ([3, 1], [2, 2]):
        found = triton.within(pages, jnp.asarray(pair, jnp.int32), axis=axis, target=HOPPER)
        expected = np.array(pages)
        np.moveaxis(expected, axis, 0)[pair[1]] = np.moveaxis(expected, axis, 0)[pair[0]]
        np.testing.assert_array_equal(found, expected)
