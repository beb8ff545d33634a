"""Reads ahead: pages of waiting sequences that only the disk has go to the host's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxserve.offload.index import HostIndex, Reservation
from jaxserve.scheduler.disk_pages import DiskPages
from jaxserve.scheduler.loading import Loads
from jaxserve.scheduler.sequence import Sequence

SEQUENCES = 4
"""The first ones of the queue for which pages are read."""

_SHARE = 4
"""Of the host's slots, the part that may wait to be read."""


class Prefetch:
    """Reads each page once, in the order of the queue, and as few at a time as others leave.

    A sequence is looked up once, when a plan has left it in the queue. What is read lies in the
    host's memory like what was stored there: it may be displaced, and the sequence's load finds it
    or reads it again.
    """

    def __init__(self, index: HostIndex, disk: DiskPages, loads: Loads):
        self._index, self._disk, self._loads = index, disk, loads
        self._wanted: deque[bytes] = deque()
        self.pages = 0
        """That were read."""

    def look(self, waiting: Iterable[Sequence], prefill_rate: float | None) -> None:
        """Want the pages of the sequences that a plan has left in the queue."""
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
        """Begin to read what is wanted."""
        while self._wanted and self._disk.can_read:
            key = self._wanted.popleft()
            if not self._disk.contains(key):
                continue
            reservation = self._index.reserve(key)
            if reservation is None:
                continue  # it is there or on its way, or all slots are in use

            def read(error: str | None, reservation: Reservation = reservation) -> None:
                if error is not None:
                    self._index.release(reservation)
                elif self._index.fill(reservation):
                    self.pages += 1

            self._disk.read(key, reservation.slot, read)

    def forget(self) -> None:
        """Want nothing of before."""
        self._wanted.clear()
