"""Links: copies by the CPU, or by a GPU's copy engine."""

from __future__ import annotations

import ctypes
import enum
from ctypes import byref, c_size_t, c_uint64, c_void_p

from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.lane import Chunk
from jaxserve_kernels.cuda_driver import check

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered against the null stream
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_…


class Direction(enum.Enum):
    """Direction of a copy, seen from the device."""

    STORE = enum.auto()
    """From the ring to the host."""
    LOAD = enum.auto()
    """From the host to the ring."""


class CpuLink:
    """Copies synchronously on the lane's thread, without the interpreter lock."""

    def enter(self) -> None:
        """Nothing to do."""

    def begin(self, chunk: Chunk, event: int) -> None:
        """Copies the chunk."""
        ctypes.memmove(chunk.target, chunk.source, chunk.nbytes)

    def wait(self, event: int) -> None:
        """Does nothing: the copy has already ended."""

    def drain(self) -> None:
        """Does nothing: all copies have already ended."""

    def close(self) -> None:
        """Nothing to do."""


class CudaLink:
    """A CUDA stream, with an event for each chunk in flight. Waiting for an event sleeps."""

    def __init__(self, cuda: CudaContext, direction: Direction, num_events: int):
        """Raises CudaError if the stream or an event cannot be created, and destroys the others."""
        self._cuda, self._driver, self._quick = cuda, cuda.driver, cuda.quick
        self._stores = direction is Direction.STORE
        self._stream = c_void_p()
        self._events: list[c_void_p] = []
        cuda.enter()
        check(self._driver.cuStreamCreate(byref(self._stream), _NON_BLOCKING), "cuStreamCreate")
        try:
            for _ in range(num_events):
                event, flags = c_void_p(), _BLOCKING_SYNC | _DISABLE_TIMING
                check(self._driver.cuEventCreate(byref(event), flags), "cuEventCreate")
                self._events.append(event)
        except RuntimeError:
            self.close()
            raise

    def enter(self) -> None:
        """Makes the context current in the lane's thread."""
        self._cuda.enter()

    def begin(self, chunk: Chunk, event: int) -> None:
        """Enqueues the copy and then its event."""
        size = c_size_t(chunk.nbytes)
        if self._stores:
            target, source = c_void_p(chunk.target), c_uint64(chunk.source)
            status = self._quick.cuMemcpyDtoHAsync_v2(target, source, size, self._stream)
            check(status, "cuMemcpyDtoHAsync")
        else:
            target, source = c_uint64(chunk.target), c_void_p(chunk.source)
            status = self._quick.cuMemcpyHtoDAsync_v2(target, source, size, self._stream)
            check(status, "cuMemcpyHtoDAsync")
        check(self._quick.cuEventRecord(self._events[event], self._stream), "cuEventRecord")

    def wait(self, event: int) -> None:
        """Sleeps until the event has happened."""
        status = self._quick.cuEventQuery(self._events[event])
        if status != _NOT_READY:
            check(status, "cuEventQuery")
            return
        check(self._driver.cuEventSynchronize(self._events[event]), "cuEventSynchronize")

    def drain(self) -> None:
        """Sleeps until the stream is empty."""
        check(self._driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")

    def close(self) -> None:
        """Destroys events and stream. Ignores errors, because nothing needs saving any more."""
        self._driver.cuCtxSetCurrent(self._cuda.context)
        while self._events:
            self._driver.cuEventDestroy_v2(self._events.pop())
        if self._stream:
            self._driver.cuStreamDestroy_v2(self._stream)
            self._stream = c_void_p()
