"""Copies of pages against the same copies in NumPy, for every layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.plan import PageCopy
from jaxserve.runner import page_copies
from jaxserve.runner.draft_cache import DraftedLayout
from jaxserve_kernels.kv_format import CacheShape, PageLayout, named
from jaxserve_kernels.kv_format.kvarn import KVarN

PAGES = 7
SHAPE = CacheShape(layers=2, pages=PAGES, kv_heads=2, page_size=4, head_dim=8, slots=3)
KVARN = KVarN(value_bits=2, group=4)
LAYOUTS: dict[str, PageLayout] = {
    "auto": named("auto"),
    "int8": named("int8"),
    "fp8_e4m3": named("fp8_e4m3"),
    "kvarn": KVARN,
    "kvarn, with a head's": DraftedLayout(model=KVARN, layers=1, kv_heads=1, head_dim=6),
}
AXES = {
    "auto": (1,),
    "int8": (1, 1),
    "fp8_e4m3": (1, None),
    "kvarn": (1, 1, 1, None),
    "kvarn, with a head's": (1, 1, 1, None, 1),
}
"""The axis of pages of each array. Scales of fp8 and KVarN's slots have none."""
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def numbered(layout: PageLayout) -> Any:
    """A cache in which every element tells where it was."""

    def fill(leaf: Any) -> np.ndarray:
        return (np.arange(leaf.size) % 101).astype(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(fill, layout.abstract(SHAPE, jnp.float32))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_axis_of_pages_is_found(name: str) -> None:
    assert LAYOUTS[name].page_axes == AXES[name]


@every_layout
def test_copies_are_done_in_their_order_and_change_nothing_else(layout: PageLayout) -> None:
    axes = layout.page_axes
    copy_pages = page_copies.program(layout, SHAPE, jnp.float32, 0).compile()
    pages = st.integers(0, PAGES - 1)
    copies = st.lists(
        st.builds(PageCopy, pages, pages, st.just(0)), max_size=2 * page_copies.COPIES + 1
    )

    @settings(max_examples=30, deadline=None)
    @given(copies)
    def check(copies: list[PageCopy]) -> None:
        expected = jax.tree.leaves(numbered(layout))
        for source, target, _ in copies:
            for leaf, axis in zip(expected, axes, strict=True):
                if axis is not None:
                    leaf[:, target] = leaf[:, source]
        got = jax.tree.map(jnp.asarray, numbered(layout))
        for packed in page_copies.pack(copies):
            got = copy_pages(got, packed)
        for a, b in zip(jax.tree.leaves(got), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)

    check()


def test_a_call_of_the_program_holds_a_fixed_number_of_copies() -> None:
    copies = [PageCopy(page, page + 10) for page in range(1, page_copies.COPIES + 2)]
    full, rest = page_copies.pack(copies)
    assert full.shape == rest.shape == (2, page_copies.COPIES)
    assert rest[:, 0].tolist() == [9, 19] and not rest[:, 1:].any(), "padding copies page 0"
    assert list(page_copies.pack([])) == []
