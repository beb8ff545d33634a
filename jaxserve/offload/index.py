"""The index of host slots: which pages they hold, and which are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

_PROTECTED = 0.8
"""The largest share of slots for pages that were used again after they were stored. Karedla et al.
1994, "Caching strategies to improve disk system performance", divide an LRU list like this."""


class Reservation(NamedTuple):
    """A slot that is reserved for a page in flight."""

    key: bytes
    slot: int
    generation: int
    """Generation of the index at the reservation, see `HostIndex.clear`."""


class HostIndex:
    """Maps the keys of pages to host slots.

    A slot is free, reserved for a page in flight, or filled. A filled slot can be found and pinned.
    If no slot is free, `reserve` evicts the least recently used page that is not pinned. Pages that
    were never used since they were stored go first, so a long run of pages used once does not evict
    pages used twice. After `clear` nothing is found: a pinned slot becomes free when it is
    unpinned, and a page in flight is dropped when it arrives.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._once: OrderedDict[bytes, None] = OrderedDict()
        """Filled slots that were not used again, least recently stored first."""
        self._again: OrderedDict[bytes, None] = OrderedDict()
        """Filled slots that were used again, least recently used first."""
        self._reserved: dict[int, Reservation] = {}
        self._coming: set[bytes] = set()
        """Keys of this generation's reservations."""
        self._pins: dict[int, int] = {}
        self._lost: set[int] = set()
        """Pinned slots whose page can no longer be found."""
        self._generation = 0
        self.evictions = 0
        """Number of evicted pages."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        """Returns the number of filled slots."""
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def has(self, key: bytes) -> bool:
        """Returns whether a page is present or in flight."""
        return key in self._slots or key in self._coming

    def touch(self, keys: Iterable[bytes]) -> None:
        """Counts a use of those pages that are present. The last one becomes the most recent."""
        for key in keys:
            if key not in self._slots:
                continue
            self._once.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)
        while len(self._again) > _PROTECTED * self.num_slots:
            self._once[self._again.popitem(last=False)[0]] = None

    def renew(self, key: bytes) -> None:
        """Marks a page as just stored, because the device had it until now."""
        order = self._once if key in self._once else self._again
        order.move_to_end(key)

    def reserve(self, key: bytes) -> Reservation | None:
        """Returns a slot for a page. None if the page is present or in flight, or if all slots are
        pinned or reserved."""
        if self.has(key):
            return None
        if not self._free:
            victim = self._victim()
            if victim is None:
                return None
            self._free.append(self._drop(victim))
            self.evictions += 1
        found = Reservation(key, self._free.pop(), self._generation)
        self._reserved[found.slot] = found
        self._coming.add(key)
        return found

    def _victim(self) -> bytes | None:
        for order in (self._once, self._again):
            for key in order:
                if self._slots[key] not in self._pins:
                    return key
        return None

    def _drop(self, key: bytes) -> int:
        self._once.pop(key, None)
        self._again.pop(key, None)
        return self._slots.pop(key)

    def fill(self, reservation: Reservation) -> bool:
        """Reports that the page has arrived. Returns whether it can be found; False if it was
        reserved before the last `clear`."""
        current = self._end(reservation)
        if current:
            self._slots[reservation.key] = reservation.slot
            self._once[reservation.key] = None
        else:
            self._free.append(reservation.slot)
        return current

    def release(self, reservation: Reservation) -> None:
        """Reports that the page did not arrive and that nothing writes the slot any more."""
        self._end(reservation)
        self._free.append(reservation.slot)

    def _end(self, reservation: Reservation) -> bool:
        assert self._reserved.pop(reservation.slot) is reservation, "it has already ended"
        current = reservation.generation == self._generation
        if current:
            self._coming.discard(reservation.key)
        return current

    def pin(self, key: bytes) -> int:
        """Pins a present page and returns its slot, which keeps the page until `unpin`."""
        slot = self._slots[key]
        self._pins[slot] = self._pins.get(slot, 0) + 1
        return slot

    def unpin(self, slot: int) -> None:
        """Undoes one `pin`."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._lost:
                self._lost.remove(slot)
                self._free.append(slot)

    def discard(self, key: bytes) -> None:
        """Removes a page whose slot has wrong content."""
        if key in self._slots:
            slot = self._drop(key)
            (self._lost.add if slot in self._pins else self._free.append)(slot)

    def clear(self) -> None:
        """Removes all pages, also those in flight."""
        self._generation += 1
        self._coming.clear()
        for key in list(self._slots):
            self.discard(key)

    def check(self) -> None:
        """Raises AssertionError unless every slot is in one state and the LRU orders match."""
        states = [*self._free, *self._reserved, *self._slots.values(), *self._lost]
        assert sorted(states) == list(range(self.num_slots)), "a slot is lost or in two states"
        assert sorted([*self._once, *self._again]) == sorted(self._slots), "the orders are wrong"
        assert self._pins.keys() <= {*self._slots.values(), *self._lost}, "a free slot is pinned"
        assert self._lost <= self._pins.keys() and all(self._pins.values())
        coming = {
            each.key for each in self._reserved.values() if each.generation == self._generation
        }
        assert coming == self._coming and coming.isdisjoint(self._slots)
