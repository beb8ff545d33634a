"""Records events of cached pages and sends them once the device has computed the pages."""

from __future__ import annotations

from collections import deque

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Sink, Stored


class CacheEvents:
    """Sends events in order, after their pages are written.

    The scheduler publishes a page when a plan computes the rest of it, and that plan may not have
    run yet. So the events of a plan are sent when it is committed. If a step fails, the pending
    events are dropped, because all pages are forgotten.
    """

    def __init__(self, sink: Sink):
        """Sends at once that nothing is cached: an earlier engine may have reported pages."""
        self._sink = sink
        sink([Cleared()])
        self._recorded: list[CacheEvent] = []
        """Events since the last complete plan."""
        self._in_flight: deque[list[CacheEvent]] = deque()
        """For each plan in flight, the events since the plan before it."""
        self._empty = True
        """No page was stored since the last clear."""

    def stored(self, event: Stored) -> None:
        self._empty = False
        self._recorded.append(event)

    def removed(self, group: int | None, content: bytes) -> None:
        """Records that a page's content hash can no longer be found."""
        last = self._recorded[-1] if self._recorded else None
        if isinstance(last, Removed) and last.group == group:
            last.hashes.append(content)
        else:
            self._recorded.append(Removed([content], group))

    def cleared(self) -> None:
        """Records that no page can be found. Records nothing if none could be found before."""
        if not self._empty:
            self._empty = True
            self._recorded.append(Cleared())
        self._tell_if_idle([])

    def planned(self) -> None:
        """Reports that a plan is complete and will be launched."""
        self._in_flight.append(self._recorded)
        self._recorded = []

    def committed(self) -> None:
        """Reports that the device has computed the oldest plan in flight."""
        self._tell_if_idle(self._in_flight.popleft())

    def failed(self) -> None:
        """Reports that no plan in flight will be committed."""
        self._in_flight.clear()
        self._recorded.clear()
        self._empty = False  # one of the dropped events may be the clear

    def _tell_if_idle(self, events: list[CacheEvent]) -> None:
        """Sends `events`. If no plan is in flight, sends the recorded events too."""
        if not self._in_flight:
            events += self._recorded
            self._recorded = []
        if events:
            self._sink(events)
