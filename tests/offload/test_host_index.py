"""The index of host slots against a model of it that is a list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.offload.index import HostIndex, Reservation

KEYS = [bytes([number]) * 32 for number in range(12)]
keys = st.sampled_from(KEYS)


class IndexAgainstModel(RuleBasedStateMachine):
    """What was filled since the last clear, was not displaced and not discarded, is found."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(5)
        self.there: dict[bytes, int] = {}
        self.open: list[tuple[Reservation, bool]] = []
        """With whether the content may still be found."""
        self.pins: list[int] = []

    @rule(key=keys)
    def reserve(self, key: bytes) -> None:
        known = key in self.there or any(each.key == key and ok for each, ok in self.open)
        evictions = self.index.evictions
        found = self.index.reserve(key)
        if found is None:
            used = set(self.pins) | {each.slot for each, _ in self.open}
            assert known or len(used) == 5
            return
        assert not known and found.slot not in self.pins
        assert found.slot not in {each.slot for each, _ in self.open}
        gone = [key for key, slot in self.there.items() if slot == found.slot]
        assert len(gone) == self.index.evictions - evictions
        for each in gone:
            del self.there[each]
        self.open.append((found, True))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 4), ok=st.booleans())
    def end(self, number: int, ok: bool) -> None:
        reservation, current = self.open.pop(number % len(self.open))
        if ok:
            assert self.index.fill(reservation) == current
        else:
            self.index.release(reservation)
        if ok and current:
            self.there[reservation.key] = reservation.slot

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        if key in self.there:
            assert self.index.pin(key) == self.there[key]
            self.pins.append(self.there[key])

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 4))
    def unpin(self, number: int) -> None:
        self.index.unpin(self.pins.pop(number % len(self.pins)))

    @rule(some=st.lists(keys))
    def touch(self, some: list[bytes]) -> None:
        self.index.touch(some)

    @rule(key=keys)
    def renew(self, key: bytes) -> None:
        if key in self.there:
            self.index.renew(key)

    @rule(key=keys)
    def discard(self, key: bytes) -> None:
        self.index.discard(key)
        self.there.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.there.clear()
        self.open = [(each, False) for each, _ in self.open]

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert {key for key in KEYS if key in self.index} == self.there.keys()
        assert len(self.index) == len(self.there)
        coming = {each.key for each, ok in self.open if ok}
        assert {key for key in KEYS if self.index.has(key)} == self.there.keys() | coming


IndexAgainstModel.TestCase.settings = settings(max_examples=300, deadline=None)
TestIndexAgainstModel = IndexAgainstModel.TestCase


def filled(index: HostIndex, *some: bytes) -> None:
    for key in some:
        reservation = index.reserve(key)
        assert reservation is not None and index.fill(reservation)


def test_the_least_recently_stored_page_goes_first() -> None:
    index = HostIndex(3)
    filled(index, *KEYS[:3])
    index.renew(KEYS[0])
    filled(index, KEYS[3])
    assert [key in index for key in KEYS[:4]] == [True, False, True, True]


def test_pages_that_nobody_asks_for_again_displace_none_that_was_used_twice() -> None:
    index = HostIndex(5)
    filled(index, *KEYS[:4])
    index.touch(KEYS[:4])
    filled(index, *KEYS[4:])  # a scan
    assert all(key in index for key in KEYS[:4])


def test_what_was_used_long_ago_goes_in_the_end() -> None:
    index = HostIndex(5)
    filled(index, *KEYS[:5])
    index.touch(KEYS[:5])  # one more than are protected: the first is as if stored just now
    filled(index, KEYS[5])
    assert KEYS[0] not in index and all(key in index for key in KEYS[1:6])
