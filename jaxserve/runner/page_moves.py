"""Moves pages between the KV cache and rings, in the order of the steps, see `plan.PageMoves`.

The state of recurrent layers moves in pieces, as if they were pages of one more group, see
`state_pieces`. A ring has one array, [slots + 1, ...], for each array of the cache that has pages.
A slot holds all layers of a page; the last slot is padding. `offload.copier` copies between rings
and the host. It uses the rings' addresses, which change only in `PageMover.reset`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.plan import PageMove, PageMoves
from jaxserve.programs.executable_cache import Executable, Program
from jaxserve.runner import kv_cache
from jaxserve.runner.state_pieces import StatePieces
from jaxserve_kernels.kv_format import CacheShape, PageLayout
from jaxserve_kernels.recurrent_state import RecurrentState
from jaxserve_kernels.ring_copies import from_ring, to_ring
from jaxserve_kernels.target import Target

SIZES = (16, 8, 1)
"""Pages per call, one program each. Up to a quarter may be padding, which takes equally long."""

type Ring = tuple[Array, ...]


class Rings(NamedTuple):
    """Slots of each cache group's store and load ring, without padding."""

    store: int
    load: int


class RingArray(NamedTuple):
    """The memory of one array of a ring: bytes [slots, slot_bytes]."""

    address: int
    slot_bytes: int


def programs(
    layouts: Sequence[PageLayout],
    shapes: Sequence[CacheShape],
    dtype: DTypeLike,
    rings: Rings | None,
    state: RecurrentState | None = None,
    *,
    target: Target,
) -> list[Program]:
    """Returns the programs that move pages of each cache group, and the program that makes rings.

    Args:
      layouts, shapes: one per cache group.
      dtype: of activations.
      rings: ring sizes; None: there are no rings and no programs.
      state: shapes of the recurrent state, whose pieces form one more group.
      target: the device that the programs are traced for.
    """
    if rings is None:
        return []
    found: list[Program] = []
    groups = _groups(layouts, shapes, dtype, state)
    for group, (kv, layout, parts) in enumerate(groups):
        store, load = (_abstract(parts, slots) for slots in rings)
        for size in SIZES:
            pairs = jax.ShapeDtypeStruct((2, size), jnp.int32)
            found += [
                Program(
                    name=_name("gather", group, size),
                    function=functools.partial(gather, layout=layout, target=target),
                    arguments=(kv, store, pairs),
                    donated=(1,),
                    details=repr(parts),
                ),
                Program(
                    name=_name("scatter", group, size),
                    function=functools.partial(scatter, layout=layout, target=target),
                    arguments=(kv, load, pairs),
                    donated=(0,),
                    details=repr(parts),
                ),
            ]
    abstract = [[_abstract(parts, slots) for _, _, parts in groups] for slots in rings]
    empty = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
    make = Program(
        name="rings",
        function=lambda: empty(abstract),
        arguments=(),
        details=repr(abstract),
    )
    return [*found, make]


def ring_bytes(
    layouts: Sequence[PageLayout],
    shapes: Sequence[CacheShape],
    dtype: DTypeLike,
    rings: Rings | None,
    state: RecurrentState | None = None,
) -> int:
    """Returns the bytes of all rings on the device."""
    slots = 0 if rings is None else rings.store + rings.load + 2
    piece = 0 if state is None else StatePieces.of(state).page_bytes(state)
    return slots * (piece + sum(kv_cache.page_bytes(layouts, shapes, dtype)))


class _Group(NamedTuple):
    kv: Any
    """Abstract."""
    layout: PageLayout | StatePieces
    parts: Sequence[Any]
    """Shapes and dtypes of a page's arrays, each with a leading axis of size 1."""


def _groups(
    layouts: Sequence[PageLayout],
    shapes: Sequence[CacheShape],
    dtype: DTypeLike,
    state: RecurrentState | None,
) -> list[_Group]:
    found = [
        _Group(layout.abstract(shape, dtype), layout, layout.page_shapes(shape, dtype))
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    if state is not None:
        pieces = StatePieces.of(state)
        found.append(_Group(state, pieces, pieces.page_shapes(state)))
    return found


def _abstract(parts: Sequence[Any], slots: int) -> Ring:
    found: Any = tuple(
        jax.ShapeDtypeStruct((slots + 1, *part.shape[1:]), part.dtype) for part in parts
    )
    return found


def _name(kind: str, group: int, size: int) -> str:
    return f"{kind}_pages_{group}_{size}"


def gather(
    kv: Any, ring: Ring, pairs: Array, *, layout: PageLayout | StatePieces, target: Target
) -> tuple[Ring, Array]:
    """Copies pages into slots of a ring.

    Args:
      kv: the cache, or the state of recurrent layers.
      ring: updated in place when donated.
      pairs: int32 [2, moves], pages and slots.
      layout: of the cache, or StatePieces.
      target: the device that the program is traced for.

    Returns:
      The ring, and a marker, int32 [], that is ready when the copies are done.
    """
    placed = _placed(kv, pairs, layout)
    ring = tuple(
        to_ring(array, part, placed, axis=axis, target=target)
        for (array, axis), part in zip(layout.page_arrays(kv), ring, strict=True)
    )
    return ring, pairs[0, 0]


def scatter(
    kv: Any, ring: Ring, pairs: Array, *, layout: PageLayout | StatePieces, target: Target
) -> tuple[Any, Array]:
    """Copies slots of a ring into pages. As `gather`, but the cache is updated in place
    when donated, and the ring is only read. Returns the cache and a marker."""
    placed = _placed(kv, pairs, layout)
    arrays = [
        from_ring(array, part, placed, axis=axis, target=target)
        for (array, axis), part in zip(layout.page_arrays(kv), ring, strict=True)
    ]
    return layout.with_page_arrays(kv, arrays), pairs[0, 0]


def _placed(kv: Any, pairs: Array, layout: PageLayout | StatePieces) -> Array:
    return pairs.at[0].set(layout.places(kv, pairs[0]))


def pack(moves: Sequence[PageMove], slots: int, padding: int = 0) -> Iterator[NDArray[np.int32]]:
    """Yields int32 [2, one of SIZES], pages and slots, until all moves are packed. All moves must
    belong to one group. Padding moves the padding page and the padding slot.

    Args:
      slots: slots of the group's ring. `PageMove.ring_slot` counts through the rings of all groups.
      padding: the padding page.
    """
    left = list(moves)
    while left:
        size = next(size for size in SIZES if 4 * len(left) >= 3 * size)
        some, left = left[:size], left[size:]
        packed = np.full((2, size), [[padding], [slots]], np.int32)
        packed[0, : len(some)] = [move.page for move in some]
        packed[1, : len(some)] = [move.ring_slot % slots for move in some]
        yield packed


class PageMover:
    """Owns the rings of all cache groups."""

    def __init__(
        self, rings: Rings, executables: Mapping[str, Executable], paddings: Sequence[int]
    ):
        """`paddings`: the padding page of each group."""
        self._slots, self._executables, self._paddings = rings, executables, paddings
        stores, loads = jax.block_until_ready(executables["rings"]())
        self._stores: list[Ring] = [tuple(ring) for ring in stores]
        self._loads: list[Ring] = [tuple(ring) for ring in loads]
        self._markers: list[Any] = []
        """Markers of launched programs that may still run."""
        self.on_new_ring: Callable[[], None] = lambda: None
        """Called when `reset` has replaced a ring, which changes its address."""

    def store_ring(self) -> list[list[RingArray]]:
        """Returns the arrays of each group's store ring. Their addresses change only in `reset`."""
        return [_parts(ring) for ring in self._stores]

    def load_ring(self) -> list[list[RingArray]]:
        """Returns the arrays of each group's load ring. Their addresses never change."""
        return [_parts(ring) for ring in self._loads]

    def warm(self, caches: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run every program once, with padding. Returns the caches, see `draft_cache.joined`."""
        before = self.store_ring(), self.load_ring()
        kept = list(caches)
        for group, page in enumerate(self._paddings):
            for size in SIZES:
                slots = np.int32(self._slots.load), np.int32(self._slots.store)
                load, store = (np.array([[page] * size, [each] * size], np.int32) for each in slots)
                kept[group] = self._scatter(group, kept[group], load)
                self._gather(group, kept[group], store)
        jax.block_until_ready((kept, self._stores))
        assert before == (self.store_ring(), self.load_ring()), "the rings have moved"
        self._markers.clear()
        return tuple(kept)

    def move(
        self, caches: tuple[Any, ...], moves: PageMoves
    ) -> tuple[tuple[Any, ...], Callable[[], bool]]:
        """Launch moves.

        Returns:
          The caches, and a function that returns at once whether all moves are done. It raises
          JaxRuntimeError if a move failed.
        """
        self._markers = [marker for marker in self._markers if not marker.is_ready()]
        others = len(self._markers)
        kept = list(caches)
        for group, padding in enumerate(self._paddings):
            restores = [move for move in moves.restores if move.group == group]
            for pairs in pack(restores, self._slots.load, padding):
                kept[group] = self._scatter(group, kept[group], pairs)
            stores = [move for move in moves.stores if move.group == group]
            for pairs in pack(stores, self._slots.store, padding):
                self._gather(group, kept[group], pairs)
        markers = self._markers[others:]

        def is_done() -> bool:
            if not all(marker.is_ready() for marker in markers):
                return False
            jax.block_until_ready(markers)  # raises if a move failed: it is ready, too
            return True

        is_done()  # a first call after later launches would wait for those, too
        return tuple(kept), is_done

    def settle(self) -> None:
        """Wait until no launched program uses the rings any more. Ignores failures."""
        for marker in self._markers:
            _has_failed(marker)
        self._markers = []

    def reset(self) -> None:
        """Make the rings usable after a failed step or move.

        Waits for running programs. Programs only read load rings, so these stay valid, and copies
        to them may go on. A failed program may have lost a store ring: it is replaced by a new one
        at another address. Data that was copied from the lost ring is invalid.
        """
        self.settle()
        lost = [number for number, ring in enumerate(self._stores) if any(map(_has_failed, ring))]
        if lost:
            stores, _ = jax.block_until_ready(self._executables["rings"]())
            for number in lost:
                self._stores[number] = tuple(stores[number])
            self.on_new_ring()

    def _scatter(self, group: int, kv: Any, pairs: NDArray[np.int32]) -> Any:
        program = self._executables[_name("scatter", group, pairs.shape[1])]
        kv, marker = program(kv, self._loads[group], pairs)
        self._markers.append(marker)
        return kv

    def _gather(self, group: int, kv: Any, pairs: NDArray[np.int32]) -> None:
        program = self._executables[_name("gather", group, pairs.shape[1])]
        self._stores[group], marker = program(kv, self._stores[group], pairs)
        self._markers.append(marker)


def _has_failed(array: Array) -> bool:
    """Waits for an array. Returns whether its content is lost."""
    if array.is_deleted():
        return True
    try:
        jax.block_until_ready(array)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _parts(ring: Ring) -> list[RingArray]:
    return [RingArray(part.unsafe_buffer_pointer(), part.nbytes // part.shape[0]) for part in ring]
