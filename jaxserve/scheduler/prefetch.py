"""Prefetch: reads pages of waiting sequences from disk to host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxserve.offload.index import HostIndex, Reservation
from jaxserve.scheduler.disk_pages import DiskPages
from jaxserve.scheduler.loading import Loads
from jaxserve.scheduler.sequence import Sequence

SEQUENCES = 4
"""Sequences at the front of the queue whose pages are read."""

_SHARE = 4
"""Pages that wait to be read may take one in this many host slots."""


class Prefetch:
    """Reads each page once, in queue order, and only as many at a time as other reads allow.

    A sequence is looked up once, after a plan has left it in the queue. Prefetched pages are
    ordinary pages in host memory: they may be evicted, and then the sequence's load reads them
    again.
    """

    def __init__(self, index: HostIndex, disk: DiskPages, loads: Loads):
        self._index, self._disk, self._loads = index, disk, loads
        self._wanted: deque[bytes] = deque()
        self.pages = 0
        """Number of pages read."""

    def look(self, waiting: Iterable[Sequence], prefill_rate: float | None) -> None:
        """Adds the pages of sequences that a plan has left in the queue."""
        for seq in waiting:
            if seq.looked_ahead or seq.loading:
                continue
            room = self._index.num_slots // _SHARE - len(self._wanted)
            if room <= 0:
                return
            seq.looked_ahead = True
            self._wanted += self._loads.wanted_from_disk(seq, prefill_rate)[:room]
        self.advance()

    def advance(self) -> None:
        """Begins to read wanted pages."""
        while self._wanted and self._disk.can_read:
            key = self._wanted.popleft()
            if not self._disk.contains(key):
                continue
            reservation = self._index.reserve(key)
            if reservation is None:
                continue  # the page is there or in flight, or all slots are in use

            def read(error: str | None, reservation: Reservation = reservation) -> None:
                if error is not None:
                    self._index.release(reservation)
                elif self._index.fill(reservation):
                    self.pages += 1

            self._disk.read(key, reservation.slot, read)

    def forget(self) -> None:
        """Drops all wanted pages."""
        self._wanted.clear()
