"""Records what happens to cached pages, and tells it when the device has computed the pages."""

from __future__ import annotations

from collections import deque

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Sink, Stored


class CacheEvents:
    """Events in the order in which they happened, held back until their pages are written.

    A page is published by the scheduler when plans compute all of it, which may not have run yet.
    What happened before a plan was complete is told when that plan is committed: the pages are in
    memory then. If a step fails, what was held back is dropped, because all pages are forgotten.
    """

    def __init__(self, sink: Sink):
        """Tells at once that nothing is cached: an engine before this one may have told more."""
        self._sink = sink
        sink([Cleared()])
        self._recorded: list[CacheEvent] = []
        """Since the last plan was complete."""
        self._in_flight: deque[list[CacheEvent]] = deque()
        """For each plan that is not committed, what happened up to it and after the one before."""
        self._empty = True
        """Nothing was stored since all was cleared."""

    def stored(self, event: Stored) -> None:
        self._empty = False
        self._recorded.append(event)

    def removed(self, group: int | None, content: bytes) -> None:
        """A page's content hash can no longer be found."""
        last = self._recorded[-1] if self._recorded else None
        if isinstance(last, Removed) and last.group == group:
            last.hashes.append(content)
        else:
            self._recorded.append(Removed([content], group))

    def cleared(self) -> None:
        """Nothing can be found any more. Nothing is recorded if nothing could be."""
        if not self._empty:
            self._empty = True
            self._recorded.append(Cleared())
        self._tell_if_idle([])

    def planned(self) -> None:
        """A plan is complete and will be launched."""
        self._in_flight.append(self._recorded)
        self._recorded = []

    def committed(self) -> None:
        """The device has computed the oldest plan that is in flight."""
        self._tell_if_idle(self._in_flight.popleft())

    def failed(self) -> None:
        """No plan in flight will be committed."""
        self._in_flight.clear()
        self._recorded.clear()
        self._empty = False  # what is dropped may be that all was cleared

    def _tell_if_idle(self, events: list[CacheEvent]) -> None:
        """Tell `events`, and with nothing in flight what was recorded since, too."""
        if not self._in_flight:
            events += self._recorded
            self._recorded = []
        if events:
            self._sink(events)
