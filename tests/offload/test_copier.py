"""Copies between rings and host memory: whole, and once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.offload import copier as copiers
from jaxserve.offload.copier import (
    CpuCopier,
    Ring,
    RingPart,
    pieces,
)
from jaxserve.offload.lane import load_depth
from jaxserve.offload.slab import HostSlab
from tests.offload.copier_setup import (
    HOST_SLOTS,
    KINDS,
    OTHER_BYTES,
    RING_SLOTS,
    SLOT_BYTES,
    DeviceRing,
    Setup,
    page,
    setups,
)


@pytest.fixture
def make() -> Iterator[Callable[..., Setup]]:
    with setups() as build:
        yield build


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_byte_for_byte(make: Callable[..., Setup], kind: str, verify: bool) -> None:
    setup = make(kind, verify=verify)
    for host_slot in range(HOST_SLOTS):
        setup.stored.write(host_slot % RING_SLOTS, page(host_slot))
        assert setup.store(host_slot % RING_SLOTS, host_slot, 7) == (7, True, None)
        assert bytes(setup.slab.slot(host_slot)) == page(host_slot)
        assert (setup.slab.checksums[host_slot] is not None) == verify
    for host_slot in reversed(range(HOST_SLOTS)):
        assert setup.load(host_slot, 1, 8) == (8, True, None)
        assert setup.loaded.read(1) == page(host_slot)
    counters = setup.copier.counters
    assert (counters.stores, counters.loads) == (HOST_SLOTS, HOST_SLOTS)
    assert counters.store_bytes == counters.load_bytes == HOST_SLOTS * SLOT_BYTES
    assert counters.store_seconds > 0 < counters.load_seconds
    assert counters.stores_failed == counters.loads_failed == counters.checksum_failures == 0


@pytest.mark.parametrize("kind", KINDS)
def test_another_ring_is_read_from_the_next_store_on(make: Callable[..., Setup], kind: str) -> None:
    setup, other = make(kind), DeviceRing()
    setup.stored.write(1, page(1))
    other.write(1, page(2))
    assert setup.store(1, 0).ok
    setup.copier.use_store_ring(other.ring)
    assert setup.store(1, 1).ok
    assert [bytes(setup.slab.slot(slot)) for slot in (0, 1)] == [page(1), page(2)]


@given(st.integers(1, 100_000), st.integers(1, 30_000))
def test_pieces_cover_everything_once(nbytes: int, most: int) -> None:
    found = list(pieces(nbytes, most))
    assert [offset for offset, _ in found] == [
        sum(size for _, size in found[:index]) for index in range(len(found))
    ]
    assert sum(size for _, size in found) == nbytes
    assert all(0 < size <= -(-most // 4096) * 4096 for _, size in found)


def test_chunks_of_a_page_are_of_one_size() -> None:
    assert list(pieces(9 << 20, 8 << 20)) == [(0, 9 << 19), (9 << 19, 9 << 19)]


def test_a_page_of_another_group_has_a_size_of_its_own(make: Callable[..., Setup]) -> None:
    setup = make("cuda", verify=True)
    setup.slab.slot(2)[:] = b"x" * SLOT_BYTES
    setup.stored.other[1] = 7
    assert setup.store(RING_SLOTS + 1, 2).ok
    assert bytes(setup.slab.slot(2)) == b"\7" * OTHER_BYTES + b"x" * (SLOT_BYTES - OTHER_BYTES)
    assert setup.load(2, RING_SLOTS + 2).ok
    assert setup.loaded.other.tolist() == [[0] * OTHER_BYTES] * 2 + [[7] * OTHER_BYTES]
    assert not any(map(np.any, setup.loaded.arrays))
    assert setup.copier.counters.store_bytes == setup.copier.counters.load_bytes == OTHER_BYTES


def test_a_ring_of_larger_pages_is_refused() -> None:
    slab = HostSlab(1, 100)
    small, large = Ring([[RingPart(0, 99)]], 1), Ring([[RingPart(0, 99)], [RingPart(0, 101)]], 1)
    with pytest.raises(ValueError, match="pages of 101 bytes in the ring, 100 on the host"):
        CpuCopier(slab, small, large, wake=lambda: None)
    slab.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_changed_in_host_memory_is_not_loaded(
    make: Callable[..., Setup], kind: str
) -> None:
    setup = make(kind, verify=True)
    setup.stored.write(0, page(1))
    setup.store(0, 0)
    before = setup.loaded.read(2)
    setup.slab.slot(0)[SLOT_BYTES - 1] ^= 1
    assert setup.load(0, 2, 5) == (5, False, "the page in host memory is damaged")
    assert setup.loaded.read(2) == before
    counters = setup.copier.counters
    assert (counters.checksum_failures, counters.loads_failed, counters.loads) == (1, 1, 0)
    assert not setup.load(3, 2).ok  # nothing was ever stored there
    setup.slab.slot(0)[SLOT_BYTES - 1] ^= 1
    assert setup.load(0, 2).ok


def test_a_store_makes_the_sum_of_the_page_before_unknown(make: Callable[..., Setup]) -> None:
    setup = make("cuda", verify=True)
    assert setup.driver
    setup.store(0, 0)
    setup.driver.gate.clear()
    setup.copier.store(0, 0, 1)
    assert setup.slab.checksums[0] is None
    setup.driver.gate.set()
    setup.wait(1)


def test_nothing_is_reported_before_it_has_happened(make: Callable[..., Setup]) -> None:
    setup = make("cuda")
    assert setup.driver
    setup.driver.gate.clear()
    setup.stored.write(0, page(3))
    setup.copier.store(0, 0, 1)
    setup.copier.load(1, 0, 2)
    begin = time.monotonic()
    assert setup.copier.poll() == []
    time.sleep(0.05)
    assert setup.copier.poll() == []
    assert time.monotonic() - begin < 1
    setup.driver.gate.set()
    assert {each.tag for each in setup.wait(2)} == {1, 2}
    assert bytes(setup.slab.slot(0)) == page(3)


def test_few_chunks_are_on_their_way_at_once(make: Callable[..., Setup]) -> None:
    setup = make("cuda", depths=(2, 2))
    assert setup.driver
    setup.driver.gate.clear()
    for tag in range(4):
        setup.copier.store(0, tag, tag)
    deadline = time.monotonic() + 5
    while len(setup.driver.copied_bytes) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(setup.driver.copied_bytes) == 2
    setup.driver.gate.set()
    setup.wait(4)
    assert sum(setup.driver.copied_bytes) == 4 * SLOT_BYTES


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_every_copy(make: Callable[..., Setup], kind: str, verify: bool) -> None:
    setup = make(kind, verify=verify)
    if setup.driver is not None:
        setup.driver.gate.clear()
        threading.Timer(0.1, setup.driver.gate.set).start()
    for tag in range(5):
        setup.copier.store(tag % 3, tag, tag)
        setup.copier.load(tag, tag % 3, 10 + tag)
    assert setup.copier.close()
    setup.copier.store(0, 0, 20)
    setup.copier.load(0, 0, 21)
    ended = setup.wait(12)
    assert sorted(each.tag for each in ended) == [*range(5), *range(10, 15), 20, 21]
    last = {each.tag: each for each in ended}
    assert last[20].error == last[21].error == "the copier is closed"


def test_a_device_that_hangs_does_not_hold_the_end(
    make: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "_CLOSING_SECONDS", 0.1)
    setup = make("cuda")
    assert setup.driver
    setup.driver.gate.clear()
    setup.copier.store(0, 0, 1)
    deadline = time.monotonic() + 5
    while "cuEventSynchronize" not in setup.driver.calls and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not setup.copier.close()
    assert setup.driver.streams, "the stream of a copy in flight was destroyed"


def test_whoever_is_woken_may_be_gone(make: Callable[..., Setup]) -> None:
    def wake() -> None:
        raise RuntimeError("Event loop is closed")

    setup = make("cpu", wake=wake)
    assert setup.store(0, 0).ok
    assert setup.store(0, 0).ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_waits_until_its_slot_is_written_while_those_before_it_end(
    make: Callable[..., Setup], kind: str
) -> None:
    setup, written = make(kind), threading.Event()
    setup.stored.write(0, page(0))
    setup.copier.store(0, 0, 1)
    setup.copier.store(1, 1, 2, written.is_set)
    assert setup.wait(1) == [(1, True, None)], "the second one is not begun"
    setup.stored.write(1, page(1))
    written.set()
    assert setup.wait(1) == [(2, True, None)]
    assert bytes(setup.slab.slot(1)) == page(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_whose_slot_is_never_written_fails_alone(
    make: Callable[..., Setup], kind: str
) -> None:
    setup = make(kind)

    def written() -> bool:
        raise RuntimeError("the device is on fire")

    setup.copier.store(0, 0, 1, written)
    assert setup.wait(1) == [(1, False, "the device is on fire")]
    setup.stored.write(1, page(1))
    assert setup.store(1, 1, 2) == (2, True, None)
    setup.copier.store(0, 0, 3, lambda: False)
    assert setup.copier.close()
    assert setup.copier.poll() == [(3, False, "the copier is closed")]


@pytest.mark.parametrize(("mib", "depth"), [(1, 8), (4.5, 8), (9, 4), (12, 4)])
def test_as_many_bytes_of_loads_are_on_their_way_whatever_a_page_has(
    mib: float, depth: int
) -> None:
    assert load_depth(int(mib * 2**20)) == depth
