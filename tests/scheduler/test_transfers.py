"""Ring slots and copies when the device fails: what it has not run is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from jaxserve.scheduler.transfers import MovesFailed, Transfers


class Ended(NamedTuple):
    tag: int
    ok: bool = True
    error: str | None = None


class Copies:
    """A copier whose copies end when `ended` has them."""

    def __init__(self) -> None:
        self.tags: list[int] = []
        self.ended: list[Ended] = []
        self.written: list[Callable[[], bool]] = []

    def store(self, ring_slot: int, host_slot: int, tag: int, written: Callable[[], bool]) -> None:
        self.tags.append(tag)
        self.written.append(written)

    def load(self, host_slot: int, ring_slot: int, tag: int) -> None:
        self.tags.append(tag)

    def poll(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended


def test_what_is_copied_from_a_ring_when_the_device_fails_is_not_kept() -> None:
    copies, stored = Copies(), list[str | None]()
    transfers = Transfers(copies, 1, store_slots=2, load_slots=2)
    for _ in range(2):  # one before the failure, one after it
        assert transfers.store(5, 0, 0, stored.append)
        transfers.launched(lambda: True)
        transfers.advance()
        if len(copies.tags) == 1:
            transfers.failed()
        assert transfers.store_ring.num_free(0) == 2 - len(copies.tags), "the copy still reads it"
    copies.ended = [Ended(tag) for tag in copies.tags]
    transfers.advance()
    assert stored == ["the device failed", None]
    assert transfers.store_ring.num_free(0) == 2 and not transfers.busy
    transfers.check()


def test_moves_that_failed_are_told_and_nothing_of_them_is_copied() -> None:
    copies, stored = Copies(), list[str | None]()
    transfers = Transfers(copies, 1, store_slots=2, load_slots=2)
    assert transfers.store(5, 0, 0, stored.append)

    def is_done() -> bool:
        raise RuntimeError("the device is on fire")

    transfers.launched(is_done)
    for _ in range(2):
        with pytest.raises(MovesFailed):
            transfers.advance()
    assert copies.written == [is_done], "the copier learns it, too"
    transfers.failed()
    assert transfers.busy and transfers.store_ring.num_free(0) == 1, "the copy has to end"
    copies.ended = [Ended(copies.tags[0], ok=False, error="it is not written")]
    transfers.advance()
    assert stored == ["the device failed"] and not transfers.busy
    transfers.check()


def test_loads_are_told_in_batches_while_others_are_on_their_way() -> None:
    copies, told = Copies(), list[int]()
    transfers = Transfers(copies, 1, store_slots=2, load_slots=50)
    for slot in range(40):
        assert transfers.load(slot, 0, lambda ring_slot, error: told.append(ring_slot))
    sizes: list[int] = []
    for first, end in ((0, 15), (15, 16), (16, 39), (39, 40)):
        copies.ended = [Ended(tag) for tag in copies.tags[first:end]]
        transfers.advance()
        sizes.append(len(told))
    assert sizes == [0, 16, 32, 40], "sixteen at a time, and the last ones at once"
    assert not transfers.busy
