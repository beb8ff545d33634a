"""Copies of which calls fail: failures, and slots that nothing touches any more."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.offload import copier as copiers
from jaxserve.offload.copier import (
    CudaCopier,
    pieces,
)
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab
from jaxserve_kernels.cuda_driver import CudaError
from tests.offload.copier_setup import (
    CALLS,
    HOST_SLOTS,
    PARTS,
    RING_SLOTS,
    SLOT_BYTES,
    DeviceRing,
    Setup,
    page,
    setups,
)
from tests.offload.fake_cuda import FakeCuda


@pytest.fixture
def make() -> Iterator[Callable[..., Setup]]:
    with setups() as build:
        yield build


@pytest.mark.parametrize("call", CALLS[:5])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_call_that_fails_once_fails_one_page(
    make: Callable[..., Setup], call: str, number: int
) -> None:
    setup = make("cuda")
    assert setup.driver
    setup.driver.fail = lambda name, count: 719 if (name, count) == (call, number) else 0
    for slot in range(3):
        setup.stored.write(slot, page(slot))
        setup.copier.store(slot, slot, slot)
    stored = setup.wait(3)
    for slot in range(3):
        setup.copier.load(slot, slot, slot)
    loaded = setup.wait(3)
    failed = [each for each in stored + loaded if not each.ok]
    assert len(failed) == 1
    assert failed[0].error is not None
    assert failed[0].error.startswith(f"CUDA error 719 from {call.removesuffix('_v2')}")
    for each in stored:
        if each.ok:
            assert bytes(setup.slab.slot(each.tag)) == page(each.tag)
    counters = setup.copier.counters
    assert counters.stores_failed + counters.loads_failed == 1
    assert counters.stores + counters.loads == 5


@pytest.mark.parametrize("call", CALLS)
def test_a_device_that_is_lost_fails_pages_or_keeps_them(
    make: Callable[..., Setup], call: str
) -> None:
    setup = make("cuda")
    assert setup.driver
    asked = threading.Event()

    def fail(name: str, _: int) -> int:
        if name == "cuStreamSynchronize":
            asked.set()
        return 719 if name in {call, "cuStreamSynchronize"} else 0

    setup.driver.fail = fail
    for tag in range(4):
        setup.copier.store(tag % 3, tag, tag)
        setup.copier.load(tag, tag % 3, 10 + tag)
    is_well = call == "cuStreamSynchronize"  # which nobody needs while nothing fails
    completions = setup.wait(8) if is_well else []
    assert is_well or asked.wait(20)
    assert setup.copier.close() == is_well
    completions += setup.copier.poll()
    tags = [each.tag for each in completions]
    assert len(set(tags)) == len(tags)
    if is_well:
        assert len(tags) == 8 and all(each.ok for each in completions)
    else:
        assert len(tags) < 8, "a copy has ended that may go on"
        assert setup.driver.streams, "the stream of a copy in flight was destroyed"
        setup.hangs = True
    if call.startswith("cuEvent"):
        assert not any(each.ok for each in completions)


def test_a_copy_that_may_go_on_has_not_ended(make: Callable[..., Setup]) -> None:
    """Its event could not be recorded, and the stream does not say whether it is empty."""
    setup = make("cuda")
    assert setup.driver
    asked = [threading.Event() for _ in range(3)]

    def fail(name: str, number: int) -> int:
        if name == "cuStreamSynchronize":
            asked[number].set()
            return 700 if number < 2 else 0
        return 700 if (name, number) == ("cuEventRecord", 0) else 0

    setup.driver.fail = fail
    setup.driver.gate.clear()
    setup.stored.write(0, page(1))
    setup.copier.store(0, 0, 1)
    assert asked[2].wait(20), "it is not asked again"
    assert setup.copier.poll() == [], "the copy has ended, but it goes on"
    setup.copier.store(1, 1, 2)
    assert len(setup.driver.copied_bytes) == 1, "another copy began meanwhile"
    setup.driver.gate.set()
    ended = {each.tag: each for each in setup.wait(2)}
    assert not ended[1].ok
    first = next(iter(pieces(PARTS[0], 4096)))[1]
    assert bytes(setup.slab.slot(0))[:first] == page(1)[:first], "the copy never was on its way"
    setup.slab.slot(0)[:] = page(2)
    setup.stored.write(2, page(3))
    assert setup.store(2, 2).ok
    assert bytes(setup.slab.slot(2)) == page(3)
    assert bytes(setup.slab.slot(0)) == page(2), "a copy that had ended went on"


def test_without_its_context_a_lane_fails_its_pages(make: Callable[..., Setup]) -> None:
    entered: list[str] = []

    def fail(name: str, _: int) -> int:
        entered.append(threading.current_thread().name)
        is_lane = threading.current_thread().name == "offload-load"
        return 201 if name == "cuCtxSetCurrent" and is_lane else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCuda, "fail", fail, raising=False)
        init = FakeCuda.__init__

        def start(self: FakeCuda) -> None:
            init(self)
            self.fail = fail

        patch.setattr(FakeCuda, "__init__", start)
        setup = make("cuda")
    assert setup.load(0, 0, 3) == (3, False, "CUDA error 201 from cuCtxSetCurrent")
    assert setup.store(0, 0).ok
    assert "offload-load" in entered


@pytest.mark.parametrize(
    ("call", "number"), [("cuStreamCreate", 0), ("cuStreamCreate", 1), ("cuEventCreate", 5)]
)
def test_a_copier_that_cannot_be_made_leaves_nothing(
    driver: FakeCuda, cuda: CudaContext, call: str, number: int
) -> None:
    slab = HostSlab(1, SLOT_BYTES, cuda=cuda)
    driver.fail = lambda name, count: 2 if (name, count) == (call, number) else 0
    rings = DeviceRing().ring, DeviceRing().ring
    with pytest.raises(CudaError, match=call):
        CudaCopier(slab, *rings, cuda=cuda, wake=lambda: None)
    assert not driver.streams | driver.events
    slab.close()


def test_without_a_driver_there_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(CudaError, match="no CUDA driver: libcuda"):
        CudaContext()


def test_a_gpu_that_is_not_there_has_no_context(driver: FakeCuda) -> None:
    with pytest.raises(CudaError, match="CUDA error 101 from cuDeviceGet"):
        CudaContext(3)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, RING_SLOTS - 1), st.integers(0, HOST_SLOTS - 1)),
        min_size=1,
        max_size=20,
    ),
    st.sets(st.tuples(st.sampled_from(CALLS), st.integers(0, 12)), max_size=4),
    st.integers(1, 5),
    st.booleans(),
)
@example([(True, 0, 0), (True, 0, 1)], {("cuEventRecord", 0), ("cuStreamSynchronize", 0)}, 2, False)
def test_slots_of_an_ended_copy_are_the_caller_s_whatever_failed(
    steps: list[tuple[bool, int, int]], failing: set[tuple[str, int]], depth: int, verify: bool
) -> None:
    """The caller uses a slot again as soon as its copy has ended, failed or not: what it writes
    then stays, and a page that arrived is the one that was sent."""
    setup = Setup("cuda", depths=(depth, depth), verify=verify)
    assert setup.driver
    calls = Counter[tuple[str, str]]()  # each lane's of its own: how they mix is chance

    def fail(name: str, _: int) -> int:
        place = threading.current_thread().name, name
        calls[place] += 1
        return 700 if (name, calls[place] - 1) in failing else 0

    setup.driver.fail = fail
    busy: dict[int, tuple[bool, int, int, bytes]] = {}
    held: dict[tuple[str, int], bytes] = {}

    def collect(count: int) -> None:
        for completion in setup.wait(count):
            is_store, ring_slot, host_slot, content = busy.pop(completion.tag)
            if is_store:
                if completion.ok:
                    assert bytes(setup.slab.slot(host_slot)) == content
                fresh = page(1000 + completion.tag)
                setup.slab.slot(host_slot)[:] = fresh
                setup.slab.checksums[host_slot] = copiers.checksum(fresh)
                held["host", host_slot] = fresh
            else:
                if completion.ok:
                    assert setup.loaded.read(ring_slot) == content
                fresh = page(2000 + completion.tag)
                setup.loaded.write(ring_slot, fresh)
                held["ring", ring_slot] = fresh

    for tag, (is_store, ring_slot, host_slot) in enumerate(steps):
        taken = {("host", h) for _, _, h, _ in busy.values()}
        taken |= {("store" if s else "ring", r) for s, r, _, _ in busy.values()}  # rings differ
        if taken & {("host", host_slot), ("store" if is_store else "ring", ring_slot)}:
            collect(len(busy))
        if is_store:
            setup.stored.write(ring_slot, page(tag))
            held.pop(("host", host_slot), None)
            busy[tag] = (True, ring_slot, host_slot, page(tag))
            setup.copier.store(ring_slot, host_slot, tag)
        else:
            held.pop(("ring", ring_slot), None)
            content = held.get(("host", host_slot))
            if content is None:
                content = page(3000 + tag)
                setup.slab.slot(host_slot)[:] = content
                setup.slab.checksums[host_slot] = copiers.checksum(content)
                held["host", host_slot] = content
            busy[tag] = (False, ring_slot, host_slot, content)
            setup.copier.load(host_slot, ring_slot, tag)
    collect(len(busy))
    assert setup.copier.close()
    for (where, slot), content in held.items():
        memory = bytes(setup.slab.slot(slot)) if where == "host" else setup.loaded.read(slot)
        assert memory == content, "a copy that had ended went on"
    setup.end()
