"""Which pages the host's slots hold, and which of them go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

_PROTECTED = 0.8
"""The most slots, as a share, of pages that were used again since they were stored. Karedla et al.
1994, "Caching strategies to improve disk system performance", divide an LRU list like this."""


class Reservation(NamedTuple):
    """A slot that waits for its content."""

    key: bytes
    slot: int
    generation: int
    """Of the index when the slot was reserved, see `HostIndex.clear`."""


class HostIndex:
    """Maps the keys of pages to host slots.

    A slot is free, reserved for content on its way, or filled. Filled slots can be found and
    pinned. If none is free, `reserve` takes the least recently used one that nobody pins: first of
    the pages that were never used since they were stored, so that a row of pages that nobody asks
    for again displaces nothing that was asked for twice. After `clear` nothing is found: pinned
    slots become free when they are unpinned, and what was reserved before is dropped when its
    content arrives.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._once: OrderedDict[bytes, None] = OrderedDict()
        """Filled and not used again; the least recently stored first."""
        self._again: OrderedDict[bytes, None] = OrderedDict()
        """Used again; the least recently used first."""
        self._reserved: dict[int, Reservation] = {}
        self._coming: set[bytes] = set()
        """Keys of the reservations of this generation."""
        self._pins: dict[int, int] = {}
        self._lost: set[int] = set()
        """Pinned slots that cannot be found any more."""
        self._generation = 0
        self.evictions = 0
        """Pages that made room for others."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        """Filled slots."""
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def has(self, key: bytes) -> bool:
        """Returns whether the page is there or on its way."""
        return key in self._slots or key in self._coming

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of these pages, where they are there. The last one is the most recent."""
        for key in keys:
            if key not in self._slots:
                continue
            self._once.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)
        while len(self._again) > _PROTECTED * self.num_slots:
            self._once[self._again.popitem(last=False)[0]] = None

    def renew(self, key: bytes) -> None:
        """Count the page as just stored: the device had it until now."""
        order = self._once if key in self._once else self._again
        order.move_to_end(key)

    def reserve(self, key: bytes) -> Reservation | None:
        """Returns a slot for a page. None if it is there or on its way, or all slots are pinned or
        reserved."""
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
        """The content has arrived. Returns whether it can be found: not if it is older than the
        last `clear`."""
        current = self._end(reservation)
        if current:
            self._slots[reservation.key] = reservation.slot
            self._once[reservation.key] = None
        else:
            self._free.append(reservation.slot)
        return current

    def release(self, reservation: Reservation) -> None:
        """The content did not arrive, and nothing writes the slot any more."""
        self._end(reservation)
        self._free.append(reservation.slot)

    def _end(self, reservation: Reservation) -> bool:
        assert self._reserved.pop(reservation.slot) is reservation, "it has ended before"
        current = reservation.generation == self._generation
        if current:
            self._coming.discard(reservation.key)
        return current

    def pin(self, key: bytes) -> int:
        """Returns the slot of a page that is there; it is kept until `unpin`."""
        slot = self._slots[key]
        self._pins[slot] = self._pins.get(slot, 0) + 1
        return slot

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._lost:
                self._lost.remove(slot)
                self._free.append(slot)

    def discard(self, key: bytes) -> None:
        """Let nobody find a page: what its slot holds is not right."""
        if key in self._slots:
            slot = self._drop(key)
            (self._lost.add if slot in self._pins else self._free.append)(slot)

    def clear(self) -> None:
        """Let nobody find anything that is there or on its way."""
        self._generation += 1
        self._coming.clear()
        for key in list(self._slots):
            self.discard(key)

    def check(self) -> None:
        """AssertionError unless every slot is in one state, and the orders have what is there."""
        states = [*self._free, *self._reserved, *self._slots.values(), *self._lost]
        assert sorted(states) == list(range(self.num_slots)), "a slot is lost or in two states"
        assert sorted([*self._once, *self._again]) == sorted(self._slots), "the orders are wrong"
        assert self._pins.keys() <= {*self._slots.values(), *self._lost}, "a free slot is pinned"
        assert self._lost <= self._pins.keys() and all(self._pins.values())
        coming = {
            each.key for each in self._reserved.values() if each.generation == self._generation
        }
        assert coming == self._coming and coming.isdisjoint(self._slots)
