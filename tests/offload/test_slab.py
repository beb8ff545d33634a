"""Host memory for pages: whole, page-aligned, pinned in pieces, or refused with the numbers."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.offload import slab as slabs
from jaxserve.offload.cuda import CudaContext, parse_cpus
from jaxserve.offload.slab import HostSlab, NotEnoughMemory
from jaxserve_kernels.cuda_driver import CudaError
from tests.offload.fake_cuda import FakeCuda

SYSTEM_PAGE = mmap.PAGESIZE


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 3 * SYSTEM_PAGE))
def test_slots_are_page_aligned_and_do_not_touch(num_slots: int, slot_bytes: int) -> None:
    slab = HostSlab(num_slots, slot_bytes)
    for slot in range(num_slots):
        assert slab.address(slot) % SYSTEM_PAGE == 0
        assert not any(slab.slot(slot))
        slab.slot(slot)[:] = bytes([slot + 1]) * slot_bytes
    for slot in range(num_slots):
        assert ctypes.string_at(slab.address(slot), slot_bytes) == bytes([slot + 1]) * slot_bytes
        assert slab.checksums[slot] is None
    slab.close()


def test_numpy_sees_a_slot_and_may_outlive_the_slab() -> None:
    slab = HostSlab(2, 100)
    array = np.frombuffer(slab.slot(1), np.uint8)
    assert array.ctypes.data == slab.address(1)
    array[:] = 5
    slab.close()
    assert array.sum() == 500


def test_memory_is_there_at_once_and_stays_out_of_children_and_core_files() -> None:
    slab = HostSlab(64, 64 * 1024)
    found = area(slab.address(0))
    assert found["Rss"] >= 64 * 64
    assert {"dd", "dc"} <= found["VmFlags"]
    slab.close()


def area(address: int) -> dict[str, Any]:
    """Returns what the kernel says of the mapping at an address, sizes in KiB."""
    inside = False
    found: dict[str, Any] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = set(value.split()) if name == "VmFlags" else value
            if value.endswith(" kB"):
                found[name] = int(value.removesuffix(" kB"))
    return found


def test_an_old_kernel_touches_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_POPULATE_WRITE", 9999)
    slab = HostSlab(16, 64 * 1024)
    assert area(slab.address(0))["Rss"] >= 16 * 64
    slab.close()


def test_too_large_a_slab_is_refused_with_the_numbers_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slabs.host_memory, "available", lambda: 5 << 30)
    monkeypatch.setattr(slabs.mmap, "mmap", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(NotEnoughMemory, match=r"6\.0 GiB .* 1\.0 GiB .* 5\.0 GiB"):
        HostSlab(6, 1 << 30)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 5), (5, 0), (-1, 5)])
def test_a_slab_has_slots_and_they_have_bytes(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slots of"):
        HostSlab(num_slots, slot_bytes)


def test_memory_is_pinned_in_pieces_of_whole_slots(
    monkeypatch: pytest.MonkeyPatch, driver: FakeCuda, cuda: CudaContext
) -> None:
    monkeypatch.setattr(slabs, "MAX_REGISTERED", 5 * SYSTEM_PAGE)
    seen: list[tuple[int, int]] = []
    slab = HostSlab(7, 2 * SYSTEM_PAGE - 1, cuda=cuda, progress=lambda *each: seen.append(each))
    starts = [slab.address(slot) for slot in (0, 2, 4, 6)]
    sizes = [4 * SYSTEM_PAGE] * 3 + [2 * SYSTEM_PAGE]
    assert driver.pinned == dict(zip(starts, sizes, strict=True))
    assert seen == [(pages * SYSTEM_PAGE, 14 * SYSTEM_PAGE) for pages in (4, 8, 12, 14)]
    slab.close()
    assert not driver.pinned


def test_a_piece_holds_at_least_one_slot(
    monkeypatch: pytest.MonkeyPatch, driver: FakeCuda, cuda: CudaContext
) -> None:
    monkeypatch.setattr(slabs, "MAX_REGISTERED", 1)
    slab = HostSlab(3, SYSTEM_PAGE, cuda=cuda)
    assert len(driver.pinned) == 3
    slab.close()


def test_if_a_piece_cannot_be_pinned_none_stays_pinned(
    monkeypatch: pytest.MonkeyPatch, driver: FakeCuda, cuda: CudaContext
) -> None:
    monkeypatch.setattr(slabs, "MAX_REGISTERED", SYSTEM_PAGE)
    driver.fail = lambda name, number: 2 if (name, number) == ("cuMemHostRegister_v2", 2) else 0
    with pytest.raises(CudaError, match=r"CUDA error 2 from cuMemHostRegister of 0\.0 GiB"):
        HostSlab(5, SYSTEM_PAGE, cuda=cuda)
    assert not driver.pinned
    assert driver.calls.count("cuMemHostUnregister") == 2


def test_threads_that_touch_memory_run_beside_the_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: CudaContext
) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(CudaContext, "near_cpus", lambda self: {0, 4095})
    monkeypatch.setattr(slabs.os, "sched_setaffinity", lambda _, cpus: asked.append(cpus))
    HostSlab(2, SYSTEM_PAGE, cuda=cuda).close()
    assert asked
    assert all(cpus == {0} for cpus in asked)


def test_processors_near_the_gpu_are_the_system_s(tmp_path: Path, cuda: CudaContext) -> None:
    assert cuda.near_cpus(tmp_path) == set()
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8\n")
    assert cuda.near_cpus(tmp_path) == {0, 1, 2, 8}


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("5\n", {5}), ("0-1,4-5", {0, 1, 4, 5})])
def test_lists_of_processors(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def test_this_process_keeps_its_processors() -> None:
    before = os.sched_getaffinity(0)
    HostSlab(4, SYSTEM_PAGE).close()
    assert os.sched_getaffinity(0) == before
