"""Copies pages between rings on the device and slots of host memory, in the background.

A ring is device memory that all pages pass through. A compiled program gathers pages into the store
ring, or scatters them out of the load ring, in the order of the steps. So the copies here access
neither the KV cache nor the inputs of a step. Each direction has its own ring and its own thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from jaxserve.offload.checksum import checksum
from jaxserve.offload.counters import OffloadCounters
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.lane import STORE_DEPTH, Chunk, Lane, Link, load_depth
from jaxserve.offload.links import CpuLink, CudaLink, Direction
from jaxserve.offload.slab import HostSlab

_CHUNK_BYTES = {Direction.STORE: 8 << 20, Direction.LOAD: 16 << 20}
"""Bytes per copy. A chunk of a store takes 0.17 ms at 50 GB/s, and the results of a step may wait
that long behind it. Nothing waits behind loads, so their chunks are larger: each chunk takes the
interpreter lock from the engine thread for a while."""

_ALIGNMENT = 4096
_CHECKERS = 4
"""Threads that compute checksums. One thread is slower than the copies over the bus."""

_CLOSING_SECONDS = 10.0
"""Time limit for copies in flight. They need far less; more means that the device hangs."""


type Written = Callable[[], bool]
"""Returns at once whether a ring slot is written. Raises if it will never be written."""


def _now() -> bool:
    return True


class Completion(NamedTuple):
    """The end of a copy."""

    tag: int
    ok: bool
    error: str | None
    """Why the copy failed; None: it succeeded."""


class Copier(Protocol):
    """Copies whole pages. All methods belong to one thread. Only `close` waits.

    `poll` returns each tag once, in any order. A copy has ended when nothing reads or writes its
    slots any more, also if it failed. So `poll` does not return a copy while the device cannot say
    whether it has ended.
    """

    @property
    def counters(self) -> OffloadCounters:
        """Counts of finished copies; updated by `poll`."""
        ...

    def store(self, ring_slot: int, host_slot: int, tag: int, written: Written = _now) -> None:
        """Copies a slot of the store ring to the host once `written` returns True. Another thread
        calls `written`."""
        ...

    def load(self, host_slot: int, ring_slot: int, tag: int) -> None:
        """Copies a host slot to the load ring."""
        ...

    def poll(self) -> list[Completion]:
        """Returns the copies that ended since the last call."""
        ...

    def close(self) -> bool:
        """Ends all copies. Copies that have not begun fail.

        Returns True if nothing accesses host memory or rings any more. False means that the device
        hangs, and that neither may be freed.
        """
        ...


class RingPart(NamedTuple):
    """One array of a ring, [slots, slot_bytes]. A ring of several arrays splits each page over
    them."""

    address: int
    """Address of the first byte: `array.unsafe_buffer_pointer()`."""
    slot_bytes: int


class Ring(NamedTuple):
    """A ring for the pages of all cache groups. Slot numbers run through all groups."""

    groups: Sequence[Sequence[RingPart]]
    """Arrays of each group, in the order of their parts in a host slot."""
    slots: int
    """Slots per group."""

    def parts(self, slot: int) -> list[RingPart]:
        """Returns the address and the bytes of each part of a slot."""
        group, number = divmod(slot, self.slots)
        return [
            RingPart(address + number * slot_bytes, slot_bytes)
            for address, slot_bytes in self.groups[group]
        ]

    def page_bytes(self, slot: int) -> int:
        """Returns the bytes of one page of the slot's group."""
        return sum(part.slot_bytes for part in self.groups[slot // self.slots])


class _Job(NamedTuple):
    direction: Direction
    ring_slot: int
    host_slot: int
    tag: int
    begins: Written
    """Returns whether the copy may begin."""


class _Ended(NamedTuple):
    job: _Job
    error: str | None
    seconds: float
    damaged: bool = False


class PageCopier:
    """A `Copier` over two links.

    With `verify`, a store computes the checksum of the page in host memory. A load fails if the
    page no longer matches it.
    """

    def __init__(
        self,
        slab: HostSlab,
        store_ring: Ring,
        load_ring: Ring,
        links: tuple[Link, Link],
        *,
        wake: Callable[[], None],
        verify: bool,
        chunk_bytes: int | None,
        depths: tuple[int, int],
        counters: OffloadCounters | None,
    ):
        """
        Args:
          slab: the host memory.
          store_ring, load_ring: the rings on the device.
          links: one for stores and one for loads. The copier closes them.
          wake: called on another thread when a copy has ended.
          verify: whether to compute and compare checksums.
          chunk_bytes: the most bytes per copy; None: the best size for each direction.
          depths: chunks in flight at once, for stores and for loads.
          counters: counters to update; None: new ones.

        Raises:
          ValueError: a page of a ring is larger than a slot of the slab.
        """
        for ring in (store_ring, load_ring):
            firsts = range(0, len(ring.groups) * ring.slots, ring.slots)
            size = max(map(ring.page_bytes, firsts))
            if size > slab.slot_bytes:
                raise ValueError(
                    f"pages of {size} bytes in the ring, {slab.slot_bytes} on the host"
                )
        self.counters = counters or OffloadCounters()
        self._slab, self._wake = slab, wake
        self._chunk_bytes = {each: chunk_bytes or size for each, size in _CHUNK_BYTES.items()}
        self._rings = {Direction.STORE: store_ring, Direction.LOAD: load_ring}
        self._ended: deque[_Ended] = deque()
        self._links = links
        self._checkers = ThreadPoolExecutor(_CHECKERS, "offload-checksum") if verify else None
        self._lanes = {
            direction: Lane[_Job](
                f"offload-{direction.name.lower()}",
                link,
                self._chunks,
                self._copied,
                depth=depth,
                ready=_begins,
            )
            for direction, link, depth in zip(Direction, links, depths, strict=True)
        }

    def store(self, ring_slot: int, host_slot: int, tag: int, written: Written = _now) -> None:
        """As in `Copier`."""
        self._slab.checksums[host_slot] = None
        job = _Job(Direction.STORE, ring_slot, host_slot, tag, written)
        self._lanes[Direction.STORE].submit(job)

    def load(self, host_slot: int, ring_slot: int, tag: int) -> None:
        """As in `Copier`."""
        job = _Job(Direction.LOAD, ring_slot, host_slot, tag, _now)
        if self._checkers is None:
            self._lanes[Direction.LOAD].submit(job)
        else:
            self._in_checker(self._check, job)

    def poll(self) -> list[Completion]:
        """As in `Copier`."""
        completions: list[Completion] = []
        while self._ended:
            ended = self._ended.popleft()
            self._count(ended)
            completions.append(Completion(ended.job.tag, ended.error is None, ended.error))
        return completions

    def use_store_ring(self, ring: Ring) -> None:
        """Copies from another ring with the same slots from the next store on. Copies in flight
        from the old ring continue."""
        self._rings[Direction.STORE] = ring

    def close(self) -> bool:
        """As in `Copier`."""
        if self._checkers is not None:
            self._checkers.shutdown()  # submits the pages that are already checked
        deadline = time.monotonic() + _CLOSING_SECONDS
        for lane in self._lanes.values():
            lane.close()
        idle = [lane.join(deadline - time.monotonic()) for lane in self._lanes.values()]
        for link, at_rest in zip(self._links, idle, strict=True):
            if at_rest:
                link.close()
        return all(idle)

    def _chunks(self, job: _Job) -> list[Chunk]:
        chunks: list[Chunk] = []
        host = self._slab.address(job.host_slot)
        for ring, nbytes in self._rings[job.direction].parts(job.ring_slot):
            for offset, size in pieces(nbytes, self._chunk_bytes[job.direction]):
                here, there = host + offset, ring + offset
                is_store = job.direction is Direction.STORE
                chunks.append(Chunk(here, there, size) if is_store else Chunk(there, here, size))
            host += nbytes
        return chunks

    def _copied(self, job: _Job, error: str | None, seconds: float) -> None:
        """Called by a lane when a copy has ended."""
        if error is None and self._checkers is not None and job.direction is Direction.STORE:
            self._in_checker(self._seal, job, seconds)
        else:
            self._end(_Ended(job, error, seconds))

    def _in_checker[*Args](
        self, function: Callable[[_Job, *Args], None], job: _Job, *args: *Args
    ) -> None:
        assert self._checkers is not None
        try:
            self._checkers.submit(function, job, *args)
        except RuntimeError:  # the pool is shut down
            self._end(_Ended(job, "the copier is closed", 0.0))

    def _seal(self, job: _Job, seconds: float) -> None:
        self._slab.checksums[job.host_slot] = checksum(self._slab.slot(job.host_slot))
        self._end(_Ended(job, None, seconds))

    def _check(self, job: _Job) -> None:
        expected = self._slab.checksums[job.host_slot]
        if expected is not None and checksum(self._slab.slot(job.host_slot)) == expected:
            self._lanes[Direction.LOAD].submit(job)
            return
        self._end(_Ended(job, "the page in host memory is damaged", 0.0, damaged=True))

    def _end(self, ended: _Ended) -> None:
        self._ended.append(ended)
        with contextlib.suppress(RuntimeError):  # the event loop of `wake` is closed
            self._wake()

    def _count(self, ended: _Ended) -> None:
        counters, ok = self.counters, ended.error is None
        size = self._rings[ended.job.direction].page_bytes(ended.job.ring_slot)
        counters.checksum_failures += ended.damaged
        if ended.job.direction is Direction.STORE:
            counters.stores += ok
            counters.stores_failed += not ok
            counters.store_bytes += ok * size
            counters.store_seconds += ok * ended.seconds
        else:
            counters.loads += ok
            counters.loads_failed += not ok
            counters.load_bytes += ok * size
            counters.load_seconds += ok * ended.seconds


class CpuCopier(PageCopier):
    """Copies to and from arrays on the CPU, which lie in host memory.

    A program must create such a ring, for example `jax.jit(lambda: jnp.zeros(…))()`, and nobody may
    hold a NumPy view of it. Then it keeps its address through all donations.
    """

    def __init__(
        self,
        slab: HostSlab,
        store_ring: Ring,
        load_ring: Ring,
        *,
        wake: Callable[[], None],
        verify: bool = False,
        chunk_bytes: int | None = None,
        counters: OffloadCounters | None = None,
    ):
        """See `PageCopier` for the arguments."""
        super().__init__(
            slab,
            store_ring,
            load_ring,
            (CpuLink(), CpuLink()),
            wake=wake,
            verify=verify,
            chunk_bytes=chunk_bytes,
            depths=_depths(load_ring, chunk_bytes),
            counters=counters,
        )


class CudaCopier(PageCopier):
    """Copies with the GPU's copy engines, on two separate streams."""

    def __init__(
        self,
        slab: HostSlab,
        store_ring: Ring,
        load_ring: Ring,
        *,
        cuda: CudaContext,
        wake: Callable[[], None],
        verify: bool = False,
        chunk_bytes: int | None = None,
        depths: tuple[int, int] | None = None,
        counters: OffloadCounters | None = None,
    ):
        """
        Args:
          cuda: the GPU of the rings; it must have pinned the slab.

        See `PageCopier` for the other arguments.

        Raises:
          CudaError: streams or events cannot be made.
        """
        depths = depths or _depths(load_ring, chunk_bytes)
        store = CudaLink(cuda, Direction.STORE, depths[0])
        try:
            load = CudaLink(cuda, Direction.LOAD, depths[1])
        except RuntimeError:
            store.close()
            raise
        super().__init__(
            slab,
            store_ring,
            load_ring,
            (store, load),
            wake=wake,
            verify=verify,
            chunk_bytes=chunk_bytes,
            depths=depths,
            counters=counters,
        )


def _depths(load_ring: Ring, chunk_bytes: int | None) -> tuple[int, int]:
    """Returns how many chunks of stores and of loads are in flight at once."""
    sizes = (part.slot_bytes for group in load_ring.groups for part in group)
    most = chunk_bytes or _CHUNK_BYTES[Direction.LOAD]
    return STORE_DEPTH, load_depth(max(next(pieces(size, most))[1] for size in sizes))


def _begins(job: _Job) -> bool:
    return job.begins()


def pieces(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, size) of as few pieces of nearly equal size as possible, none above `most`
    rounded up to 4 KiB."""
    size = -(-nbytes // -(-nbytes // most))
    size = -(-size // _ALIGNMENT) * _ALIGNMENT
    for offset in range(0, nbytes, size):
        yield offset, min(size, nbytes - offset)
