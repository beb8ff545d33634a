"""CUDA's driver as far as copies need it, with device memory that is the host's.

Copies happen as late as they may: when somebody waits for them, and not before the gate is open. So
a copy that is reported too early has not happened. Host memory must be pinned, and no copy may
cross the border between two registrations. Every call needs the context in its thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

CONTEXT = 77
INVALID_VALUE, INVALID_CONTEXT, NOT_READY, NOT_REGISTERED = 1, 201, 600, 713


class FakeCuda:
    """Set `fail` to make calls fail: it gets the call's name and number, and returns a status."""

    def __init__(self) -> None:
        self.fail: Callable[[str, int], int] = lambda name, number: 0
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.pinned: dict[int, int] = {}
        self.streams: set[int] = set()
        self.events: set[int] = set()
        self.copied_bytes: list[int] = []
        self._current = threading.local()
        self._queues: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self._done: dict[int, int] = defaultdict(int)
        self._recorded: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()
        self._handles = 100

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        implementation = getattr(self, f"_{name}")

        def call(*arguments: Any) -> int:
            with self._lock:
                number = self.calls.count(name)
                self.calls.append(name)
            if name.startswith(("cuStream", "cuEvent", "cuMem")) and not self._has_context():
                return INVALID_CONTEXT
            return self.fail(name, number) or implementation(*arguments) or 0

        return call

    def _has_context(self) -> bool:
        return getattr(self._current, "context", None) == CONTEXT

    def _handle(self, place: Any, among: set[int]) -> None:
        self._handles += 1
        place._obj.value = self._handles
        among.add(self._handles)

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0 if ordinal == 0 else 101

    def _cuDeviceGetPCIBusId(self, name: Any, size: int, device: Any) -> None:
        name.value = b"0000:1B:00.0"

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = CONTEXT

    def _cuCtxSetCurrent(self, context: Any) -> None:
        self._current.context = context.value

    def _cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> None:
        assert flags == 1  # for all contexts
        assert address.value % 4096 == 0
        self.pinned[address.value] = size.value

    def _cuMemHostUnregister(self, address: Any) -> int:
        return 0 if self.pinned.pop(address.value, None) else NOT_REGISTERED

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1  # not ordered with the null stream
        self._handle(stream, self.streams)

    def _cuStreamDestroy_v2(self, stream: Any) -> None:
        self.streams.remove(stream.value)

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == 3  # sleeps, and keeps no time
        self._handle(event, self.events)

    def _cuEventDestroy_v2(self, event: Any) -> None:
        self.events.remove(event.value)

    def _cuMemcpyDtoHAsync_v2(self, host: Any, device: Any, size: Any, stream: Any) -> int:
        return self._copy(host.value, device.value, host.value, size.value, stream)

    def _cuMemcpyHtoDAsync_v2(self, device: Any, host: Any, size: Any, stream: Any) -> int:
        return self._copy(device.value, host.value, host.value, size.value, stream)

    def _copy(self, target: int, source: int, host: int, size: int, stream: Any) -> int:
        if not any(a <= host and host + size <= a + n for a, n in list(self.pinned.items())):
            return INVALID_VALUE
        with self._lock:
            self.copied_bytes.append(size)
            self._queues[stream.value].append(lambda: ctypes.memmove(target, source, size))
        return 0

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        with self._lock:
            number = len(self._queues[stream.value])
            self._recorded[event.value] = (stream.value, number)

    def _cuEventSynchronize(self, event: Any) -> None:
        self._run(*self._recorded[event.value])

    def _cuEventQuery(self, event: Any) -> int:
        stream, number = self._recorded[event.value]
        with self._lock:
            return 0 if self._done[stream] >= number else NOT_READY

    def _cuStreamSynchronize(self, stream: Any) -> None:
        self._run(stream.value, len(self._queues[stream.value]))

    def _run(self, stream: int, number: int) -> None:
        self.gate.wait()
        with self._lock:
            copies = self._queues[stream]
            for index in range(number):
                copies[index]()
                copies[index] = lambda: None
            self._done[stream] = max(self._done[stream], number)
