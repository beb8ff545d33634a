"""A copier with its rings and its memory, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from jaxserve.offload.copier import (
    Completion,
    CpuCopier,
    CudaCopier,
    PageCopier,
    Ring,
    RingPart,
)
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab
from tests.offload.fake_cuda import FakeCuda

CALLS = (
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamSynchronize",
)
PARTS = (5000, 4096, 77)
SLOT_BYTES = sum(PARTS)
OTHER_BYTES = 800
"""Of a page of the second group."""
RING_SLOTS, HOST_SLOTS = 3, 5
KINDS = ("cpu", "cuda")


class DeviceRing:
    """Device memory: of the first group as many arrays as a page has parts, of the second one."""

    def __init__(self) -> None:
        self.arrays = [np.zeros((RING_SLOTS, size), np.uint8) for size in PARTS]
        self.other = np.zeros((RING_SLOTS, OTHER_BYTES), np.uint8)
        groups = [self.arrays, [self.other]]
        parts = [[RingPart(each.ctypes.data, each.shape[1]) for each in group] for group in groups]
        self.ring = Ring(parts, RING_SLOTS)

    def write(self, slot: int, page: bytes) -> None:
        content, begin = np.frombuffer(page, np.uint8), 0
        for array in self.arrays:
            array[slot] = content[begin : begin + array.shape[1]]
            begin += array.shape[1]

    def read(self, slot: int) -> bytes:
        return b"".join(array[slot].tobytes() for array in self.arrays)


class Setup:
    """A copier with its rings and its memory, on a CPU or on a driver of the test's."""

    def __init__(self, kind: str, **options: Any):
        self.driver: FakeCuda | None = None
        self.woken = threading.Event()
        self.hangs = False
        """The driver never says that copies have ended."""
        self.stored, self.loaded = DeviceRing(), DeviceRing()
        rings = (self.stored.ring, self.loaded.ring)
        options = {"wake": self.woken.set, "chunk_bytes": 4096, **options}
        if kind == "cpu":
            self.slab = HostSlab(HOST_SLOTS, SLOT_BYTES)
            self.copier: PageCopier = CpuCopier(self.slab, *rings, **options)
        else:
            self.driver = FakeCuda()
            with pytest.MonkeyPatch.context() as patch:
                for name in ("library", "locked_library"):
                    patch.setattr(f"jaxserve_kernels.cuda_driver.{name}", lambda: self.driver)
                cuda = CudaContext()
            self.slab = HostSlab(HOST_SLOTS, SLOT_BYTES, cuda=cuda)
            self.copier = CudaCopier(self.slab, *rings, cuda=cuda, **options)

    def wait(self, count: int) -> list[Completion]:
        """Returns exactly `count` completions."""
        found: list[Completion] = []
        deadline = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} completions"
            self.woken.wait(0.05)
            self.woken.clear()
            found += self.copier.poll()
        assert len(found) == count
        return found

    def store(self, ring_slot: int, host_slot: int, tag: int = 0) -> Completion:
        self.copier.store(ring_slot, host_slot, tag)
        (completion,) = self.wait(1)
        return completion

    def load(self, host_slot: int, ring_slot: int, tag: int = 0) -> Completion:
        self.copier.load(host_slot, ring_slot, tag)
        (completion,) = self.wait(1)
        return completion

    def end(self) -> None:
        assert self.copier.close() != self.hangs
        if self.driver is not None and not self.hangs:
            assert not self.driver.streams | self.driver.events
        self.slab.close()


@contextlib.contextmanager
def setups() -> Generator[Callable[..., Setup]]:
    """What makes copiers; all are closed at the end."""
    made: list[Setup] = []

    def build(kind: str, **options: Any) -> Setup:
        made.append(Setup(kind, **options))
        return made[-1]

    yield build
    for setup in made:
        if setup.driver is not None:
            setup.driver.gate.set()
        setup.end()


def page(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SLOT_BYTES)
