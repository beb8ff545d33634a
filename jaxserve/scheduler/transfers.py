"""Pages in flight between the KV cache and the host: ring slots, launches and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.plan import PageMove, PageMoves


class Ended(Protocol):
    """The end of a copy."""

    @property
    def tag(self) -> int: ...
    @property
    def ok(self) -> bool: ...
    @property
    def error(self) -> str | None: ...


class Copier(Protocol):
    """Copies pages between rings and host slots, on its own streams or threads.

    `poll` returns each tag once, in any order. After that nothing accesses the slots of the copy.
    """

    def store(
        self, ring_slot: int, host_slot: int, tag: int, written: Callable[[], bool], /
    ) -> None:
        """Copies a slot of the store ring to the host once `written` returns True. Another thread
        calls `written`."""
        ...

    def load(self, host_slot: int, ring_slot: int, tag: int) -> None:
        """Copies a host slot to the load ring."""
        ...

    def poll(self) -> Sequence[Ended]:
        """Returns the copies that ended since the last call. Returns at once."""
        ...


_FAILED = "the device failed"

_BATCH = 16
"""While other loads are in flight, the ends of this many loads are reported together. A few large
launches cost the device and the engine less than many small ones. The largest program moves this
many pages. A larger batch would leave too few slots of a 56-slot ring for the link."""

type Then = Callable[[str | None], None]
"""Called when a copy has ended, with the error or None."""


class MovesFailed(RuntimeError):
    """The device did not run launched moves. It has failed, as if a step had failed."""


class _Store(NamedTuple):
    move: PageMove
    host_slot: int
    then: Then


class _Launch(NamedTuple):
    """Launched moves."""

    is_done: Callable[[], bool]
    """Returns at once whether the moves have run. Raises if they failed."""
    restores: list[PageMove]


class _Slots:
    """The free slots of a ring. Each group has the same number of slots."""

    def __init__(self, groups: int, count: int):
        self._free = [list(range(group * count, (group + 1) * count)) for group in range(groups)]
        self.count = count

    def num_free(self, group: int) -> int:
        return len(self._free[group])

    def take(self, group: int) -> int | None:
        return self._free[group].pop() if self._free[group] else None

    def give_back(self, slot: int) -> None:
        self._free[slot // self.count].append(slot)

    def all_free(self) -> list[int]:
        return [slot for free in self._free for slot in free]


class Transfers:
    """Moves pages through the rings.

    A store is launched with the moves of a turn. The copier watches for their end and then copies
    the ring slot to the host. The engine could not watch in time, because it waits for steps. A
    load is first copied to its ring slot and then launched. A ring slot is free again when the copy
    out of it has ended, or when the launched move that reads it has run. The ring slot of a load
    that is given up stays in use until its copy has ended.
    """

    def __init__(self, copier: Copier, groups: int, *, store_slots: int, load_slots: int):
        """`store_slots` and `load_slots` are the ring slots of each group."""
        self._copier = copier
        self.store_ring, self.load_ring = _Slots(groups, store_slots), _Slots(groups, load_slots)
        self._stores: list[_Store] = []
        self._restores: list[PageMove] = []
        """Moves of this turn that are not launched yet."""
        self._launches: list[_Launch] = []
        self._copies: dict[int, Then] = {}
        self._loading: set[int] = set()
        """Tags of loads that have not ended."""
        self._loaded: list[Ended] = []
        """Loads that have ended but were not reported yet."""
        self._batch = max(1, min(_BATCH, load_slots // 3))
        self._tag = self._failures = 0

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._stores or self._restores or self._launches or self._copies)

    @property
    def num_copies(self) -> int:
        """Number of copies that have not ended."""
        return len(self._copies)

    def store(self, page: int, group: int, host_slot: int, then: Then) -> bool:
        """Copies a page as it is before the next plan. Returns False if no ring slot is free."""
        slot = self.store_ring.take(group)
        if slot is None:
            return False
        self._stores.append(_Store(PageMove(page, slot, group), host_slot, then))
        return True

    def load(self, host_slot: int, group: int, then: Callable[[int, str | None], None]) -> bool:
        """Copies a host slot to a slot of the load ring and then calls `then` with that slot, which
        the caller now owns. Returns False if no ring slot is free."""
        slot = self.load_ring.take(group)
        if slot is None:
            return False
        tag = self._begin(lambda error: then(slot, error))
        self._loading.add(tag)
        self._copier.load(host_slot, slot, tag)
        return True

    def restore(self, page: int, ring_slot: int, group: int) -> None:
        """Writes a slot of the load ring to a page before the next plan."""
        self._restores.append(PageMove(page, ring_slot, group))

    def take(self) -> PageMoves | None:
        """Returns the moves to launch before the next step; then call `launched` or `failed`."""
        if not self._stores and not self._restores:
            return None
        return PageMoves(tuple(self._restores), tuple(each.move for each in self._stores))

    def launched(self, is_done: Callable[[], bool]) -> None:
        """Reports that the moves of `take` are launched. `is_done` returns at once whether they
        have run; any thread may call it."""
        self._launches.append(_Launch(is_done, self._restores))
        stores, self._stores, self._restores = self._stores, [], []
        for store in stores:
            self._copy_out(store, is_done)

    def advance(self) -> None:
        """Handles moves and copies that have ended.

        Raises:
          MovesFailed: the device failed; call `failed`.
        """
        while self._launches and _has_run(self._launches[0]):
            launch = self._launches.pop(0)
            for move in launch.restores:
                self.load_ring.give_back(move.ring_slot)
        for ended in self._copier.poll():
            if ended.tag in self._loading:
                self._loading.remove(ended.tag)
                self._loaded.append(ended)
            else:
                self._tell(ended)
        count = len(self._loaded)
        if self._loading:
            count -= count % self._batch
        told, self._loaded = self._loaded[:count], self._loaded[count:]
        for ended in told:
            self._tell(ended)

    def _tell(self, ended: Ended) -> None:
        self._copies.pop(ended.tag)(None if ended.ok else ended.error or "unknown")

    def _copy_out(self, store: _Store, written: Callable[[], bool]) -> None:
        slot, failures = store.move.ring_slot, self._failures

        def then(error: str | None) -> None:
            self.store_ring.give_back(slot)
            store.then(error if failures == self._failures else _FAILED)

        self._copier.store(slot, store.host_slot, self._begin(then), written)

    def _begin(self, then: Then) -> int:
        self._tag += 1
        self._copies[self._tag] = then
        return self._tag

    def failed(self) -> None:
        """Reports that the device has failed. It runs no more of the launched moves, or has lost
        their results. Its store ring may be lost too, so copies in flight from it are worthless.
        Slots are reused only when the device is idle."""
        self._failures += 1
        restores = [move for launch in self._launches for move in launch.restores]
        for move in (*restores, *self._restores):
            self.load_ring.give_back(move.ring_slot)
        stores, self._launches, self._stores, self._restores = self._stores, [], [], []
        for store in stores:
            self.store_ring.give_back(store.move.ring_slot)
            store.then(_FAILED)

    def check(self) -> None:
        """Raises AssertionError if a ring slot is free twice, or free while something uses it."""
        launched = [move for launch in self._launches for move in launch.restores]
        for ring, used in (
            (self.store_ring, [each.move for each in self._stores]),
            (self.load_ring, [*launched, *self._restores]),
        ):
            slots = [*ring.all_free(), *(move.ring_slot for move in used)]
            assert len(set(slots)) == len(slots), "a ring slot is given out twice"


def _has_run(launch: _Launch) -> bool:
    try:
        return launch.is_done()
    except Exception as error:
        raise MovesFailed("moving pages to or from the host failed on the device") from error
