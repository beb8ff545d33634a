"""Host memory for KV cache pages: slots of equal size, pinned if there is a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_void_p
from typing import Any

from jaxserve import host_memory
from jaxserve.offload.cuda import CudaContext
from jaxserve_kernels.cuda_driver import check

type Progress = Callable[[int, int], None]
"""Called with the bytes that are ready and the total bytes."""

MAX_REGISTERED = 64 << 30
"""The most bytes per registration. Registrations of 512 GiB and more are reported to fail."""

RESERVE = 1 << 30
"""Bytes of host memory to leave free besides the slab."""

_POPULATE_WRITE = 23  # madvise constant, since Linux 5.14
_PIECE = 256 << 20
"""Bytes that one call touches, and so the step of the progress."""
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE


class NotEnoughMemory(RuntimeError):
    """The machine, or a cgroup of this process, has too little memory for a slab."""


class HostSlab:
    """Slots of host memory. Each holds one page of the KV cache in any format.

    The memory belongs to this process alone. Children do not inherit it, because their copies would
    cost as much again, and core files do not contain it. It uses huge pages if the system has them.

    Attributes:
      num_slots: number of slots.
      slot_bytes: used bytes per slot.
      stride: bytes from one slot to the next, a multiple of the system's page size.
      checksums: checksum of each slot's content; None: unknown. Whoever fills a slot sets it.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        cuda: CudaContext | None = None,
        progress: Progress | None = None,
        threads: int = 8,
    ):
        """Allocates, touches and pins the memory. Checks first that enough memory is available.

        Args:
          num_slots: at least 1.
          slot_bytes: bytes of a page in its format, in all layers.
          cuda: the GPU for which the memory is pinned; None: it is not pinned.
          progress: called while memory is touched and pinned.
          threads: number of threads that touch memory.

        Raises:
          NotEnoughMemory: too little memory is available; the message has the numbers.
          CudaError: the driver cannot pin the memory. Nothing stays pinned.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"a slab of {num_slots} slots of {slot_bytes} bytes is empty")
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.checksums: list[int | None] = [None] * num_slots
        self._cuda = cuda
        self._registered: list[int] = []
        size = num_slots * self.stride
        _check_available(size)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            self._make_ready(size, threads, progress)
        except BaseException:
            self.close()
            raise

    def address(self, slot: int) -> int:
        """Returns the address of a slot in this process's memory."""
        return self._address + slot * self.stride

    def slot(self, slot: int) -> memoryview:
        """Returns the bytes of a slot, [slot_bytes], for reading and writing."""
        return self._view[slot * self.stride :][: self.slot_bytes]

    def block(self, slot: int) -> memoryview:
        """Returns a slot with its padding up to the next slot, [stride], as direct disk I/O
        needs."""
        return self._view[slot * self.stride :][: self.stride]

    def close(self) -> None:
        """Unpins and frees the memory. Nothing may access it any more.

        Memory that is still exported, for example as NumPy arrays, is freed with its last export.
        """
        if self._cuda is not None:
            with contextlib.suppress(RuntimeError):
                self._cuda.enter()
            for address in self._registered:
                self._cuda.driver.cuMemHostUnregister(c_void_p(address))
        self._registered.clear()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()

    def _make_ready(self, size: int, threads: int, progress: Progress | None) -> None:
        """Touches all memory and pins it, one registration at a time.

        Each registration covers whole slots, because no copy may cross the border between two.
        """
        if self._cuda is not None:
            self._cuda.enter()
        limit = max(1, MAX_REGISTERED // self.stride) * self.stride
        cpus = set() if self._cuda is None else self._cuda.near_cpus()
        with ThreadPoolExecutor(threads, "touch-host-memory", _run_on, (cpus,)) as pool:
            for begin in range(0, size, limit):
                piece = min(limit, size - begin)
                for done in _touch(pool, self._address + begin, piece):
                    if progress is not None:
                        progress(begin + done, size)
                if self._cuda is not None:
                    self._register(self._cuda, self._address + begin, piece)

    def _register(self, cuda: CudaContext, address: int, size: int) -> None:
        status = cuda.driver.cuMemHostRegister_v2(c_void_p(address), c_size_t(size), _PORTABLE)
        what = f"cuMemHostRegister of {size / 2**30:.1f} GiB"
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if status and 0 <= locked < size:  # most drivers do not count pinned memory against it
            what += f", where `ulimit -l` allows {locked / 2**20:.1f} MiB of locked memory"
        check(status, what)
        self._registered.append(address)


def _check_available(size: int) -> None:
    free = host_memory.available()
    if size + RESERVE > free:
        gib = 2**30
        raise NotEnoughMemory(
            f"the host tier of {size / gib:.1f} GiB and {RESERVE / gib:.1f} GiB in reserve do not "
            f"fit: {free / gib:.1f} GiB of host memory are available to this process"
        )


def _run_on(cpus: set[int]) -> None:
    """Binds this thread to the given CPUs, so that the memory it touches lies close to them."""
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)


def _touch(pool: ThreadPoolExecutor, address: int, size: int) -> Iterator[int]:
    """Touches memory in parallel. Yields the number of bytes touched so far."""
    library: Any = ctypes.CDLL(None)

    def touch(begin: int) -> None:
        where, count = c_void_p(address + begin), c_size_t(min(_PIECE, size - begin))
        if library.madvise(where, count, _POPULATE_WRITE) != 0:  # before Linux 5.14
            ctypes.memset(where, 0, count.value)

    starts = range(0, size, _PIECE)
    for number, _ in enumerate(pool.map(touch, starts), 1):
        yield min(number * _PIECE, size)
