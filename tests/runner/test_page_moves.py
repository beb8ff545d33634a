"""Moves between pages and rings against the same in NumPy, for every layout."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.plan import PageMove, PageMoves
from jaxserve.runner import page_moves
from jaxserve.runner.page_moves import PageMover, Rings
from jaxserve_kernels.kv_format import PageLayout
from jaxserve_kernels.target import Target
from tests.runner.page_layouts import AXES, LAYOUTS, PAGES, SHAPE, every_layout, numbered

RINGS = Rings(store=40, load=36)


def pages_of(kv: Any, layout: PageLayout) -> list[np.ndarray]:
    """The arrays that have pages, with their axis first."""
    leaves = zip(jax.tree.leaves(kv), layout.page_axes, strict=True)
    return [np.moveaxis(np.asarray(leaf), axis, 0) for leaf, axis in leaves if axis is not None]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_axis_of_pages_is_found(name: str) -> None:
    assert LAYOUTS[name].page_axes == AXES[name]


def mover_of(layout: PageLayout, groups: int = 1) -> PageMover:
    shapes = [SHAPE] * groups
    found = page_moves.programs([layout] * groups, shapes, jnp.float32, RINGS, target=Target.here())
    return PageMover(RINGS, {each.name: each.compile() for each in found}, (0,) * groups)


def contents(parts: list[page_moves.RingArray], slots: int) -> list[bytes]:
    """What the slots of a ring hold, read behind JAX's back."""
    return [
        b"".join(
            bytes(_memory(part.address + slot * part.slot_bytes, part.slot_bytes)) for part in parts
        )
        for slot in range(slots)
    ]


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


@every_layout
def test_a_page_goes_to_the_ring_and_comes_back_with_every_byte(layout: PageLayout) -> None:
    mover = mover_of(layout)
    pages = st.integers(1, PAGES - 1)
    stores = st.lists(st.tuples(pages, st.integers(0, RINGS.store - 1)), max_size=40)
    restores = st.lists(
        st.tuples(pages, st.integers(0, RINGS.load - 1)), max_size=6, unique_by=lambda it: it[0]
    )

    @settings(max_examples=20, deadline=None)
    @given(stores, restores)
    def check(stores: list[tuple[int, int]], restores: list[tuple[int, int]]) -> None:
        stores = list({slot: (page, slot) for page, slot in stores}.values())
        kv = jax.tree.map(jnp.asarray, numbered(layout))
        (load,) = mover.load_ring()
        for number, part in enumerate(load):
            held = np.arange(RINGS.load * part.slot_bytes) % (97 + number)
            _memory(part.address, held.size)[:] = held.astype(np.uint8).tobytes()
        before, came = numbered(layout), contents(load, RINGS.load)
        moves = PageMoves(
            tuple(PageMove(*each) for each in restores), tuple(PageMove(*each) for each in stores)
        )
        (kv,), is_done = mover.move((kv,), moves)
        jax.block_until_ready(kv)
        mover.settle()
        assert is_done()
        expected, got = pages_of(before, layout), pages_of(kv, layout)
        there = {page: came[slot] for page, slot in restores}
        for page in range(1, PAGES):
            whole = b"".join(array[page].tobytes() for array in expected)
            assert b"".join(array[page].tobytes() for array in got) == there.get(page, whole)
        (store,) = mover.store_ring()
        left = contents(store, RINGS.store)
        for page, slot in stores:
            assert left[slot] == b"".join(array[page].tobytes() for array in got), "after restores"
        others = zip(jax.tree.leaves(before), jax.tree.leaves(kv), layout.page_axes, strict=True)
        for old, new, axis in others:
            if axis is None:
                np.testing.assert_array_equal(old, np.asarray(new))

    check()


def test_rings_stay_where_they_are_and_each_group_has_its_own() -> None:
    mover = mover_of(LAYOUTS["auto"], groups=2)
    kv = tuple(jax.tree.map(jnp.asarray, numbered(LAYOUTS["auto"])) for _ in range(2))
    kv = mover.warm(kv)
    before = mover.store_ring(), mover.load_ring()
    slot = RINGS.store + 3  # slots count through the groups
    kv, _ = mover.move(kv, PageMoves((), (PageMove(2, slot, 1),)))
    mover.settle()
    assert before == (mover.store_ring(), mover.load_ring())
    first, second = (contents(parts, RINGS.store) for parts in mover.store_ring())
    held = b"".join(array[2].tobytes() for array in pages_of(kv[1], LAYOUTS["auto"]))
    assert second[3] == held and held not in first


def test_calls_are_large_and_three_quarters_full() -> None:
    moves = [PageMove(page, page, 0) for page in range(1, 70)]
    sizes = [[pairs.shape[1] for pairs in page_moves.pack(moves[:n], 100)] for n in (1, 5, 24, 69)]
    assert sizes == [[1], [1] * 5, [16, 8], [16, 16, 16, 16, *[1] * 5]]
    (pairs,) = page_moves.pack(moves[:6], 100)
    assert pairs.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0], [1, 2, 3, 4, 5, 6, 100, 100]]
    assert list(page_moves.pack([], 100)) == []


def test_moves_that_the_device_could_not_run_are_not_done() -> None:
    """An array of a failed program is ready, too: what lies in the ring then is something else."""

    class Failed:
        def is_ready(self) -> bool:
            return True

        def is_deleted(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("it failed")

    mover = mover_of(LAYOUTS["auto"])
    ring = mover._stores[0]  # pyright: ignore[reportPrivateUsage]
    mover._executables = {"gather_pages_0_1": lambda *_: (ring, Failed())}  # pyright: ignore
    with pytest.raises(jax.errors.JaxRuntimeError, match="it failed"):
        mover.move((None,), PageMoves((), (PageMove(1, 0, 0),)))
    mover.settle()


def test_a_ring_that_a_failed_program_took_is_made_anew() -> None:
    mover = mover_of(LAYOUTS["auto"], groups=2)
    caches = tuple(jax.tree.map(jnp.asarray, numbered(LAYOUTS["auto"])) for _ in range(2))
    stores, loads = mover.store_ring(), mover.load_ring()
    seen: list[Any] = []
    mover.on_new_ring = lambda: seen.append(mover.store_ring())
    mover.reset()
    assert not seen and mover.store_ring() == stores
    for array in mover._stores[1]:  # pyright: ignore[reportPrivateUsage]
        array.delete()  # as the donation to a program that failed
    mover.reset()
    (after,) = seen
    assert after[0] == stores[0] and mover.load_ring() == loads, "a ring that was whole has moved"
    _, is_done = mover.move(caches, PageMoves((), (PageMove(2, RINGS.store + 3, 1),)))
    mover.settle()
    assert is_done() and mover.store_ring() == after
    held = b"".join(array[2].tobytes() for array in pages_of(caches[1], LAYOUTS["auto"]))
    assert contents(after[1], RINGS.store)[3] == held
