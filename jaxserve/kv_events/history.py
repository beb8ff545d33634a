"""The most recent numbered batches, and the cached pages after them."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Stored
from jaxserve.kv_events.wire import encode


class _Page(NamedTuple):
    """A cached page."""

    parent: bytes | None
    tokens: bytes
    """Token ids as int32."""
    salt: str
    group: int | None
    window: int | None


class History:
    """Numbers batches from 0 and answers requests for past ones.

    A ring holds the newest batches. The answer for an older number has all cached pages under that
    number, and then empty batches up to the newest. So an index that starts late, or missed more
    than the ring holds, becomes complete without a missing number.

    Inconsistent events are left out: pages after a page that is not cached, and removals of pages
    that are not cached. They occur only if the events of a step were lost.
    """

    def __init__(self, buffer_steps: int, *, as_array: bool = False):
        """`buffer_steps`: number of batches in the ring. `as_array`: see `wire.encode`."""
        self._batches: deque[bytes] = deque(maxlen=buffer_steps)
        self._pages: dict[tuple[int | None, bytes], _Page] = {}
        """Pages by group and hash, in order of storing: each page after its parent."""
        self._next = 0
        self._as_array = as_array
        self._lock = threading.Lock()

    @property
    def num_batches(self) -> int:
        """Number of batches so far."""
        return self._next

    @property
    def num_pages(self) -> int:
        """Number of cached pages in all groups."""
        return len(self._pages)

    def append(self, events: Iterable[CacheEvent]) -> tuple[int, bytes] | None:
        """Adds a batch of events. Returns its number and payload; None if no event is left.

        Call it on one thread. Other threads may call `since` meanwhile.
        """
        with self._lock:
            kept = [kept for event in events if (kept := self._apply(event)) is not None]
            if not kept:
                return None
            payload = encode(time.time(), kept, array=self._as_array)
            self._batches.append(payload)
            self._next += 1
            return self._next - 1, payload

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yields number and payload of each batch from number `start` on. Callable from any
        thread."""
        with self._lock:
            end, first = self._next, self._next - len(self._batches)
            held = list(self._batches)[max(start - first, 0) :]
            pages = list(self._pages.items()) if start < first else []
        if start >= first:
            yield from enumerate(held, start=start)
            return
        now = time.time()
        yield start, encode(now, [Cleared(), *_stored_again(pages)], array=self._as_array)
        empty = encode(now, [], array=self._as_array)
        for number in range(start + 1, end):
            yield number, empty

    def _apply(self, event: CacheEvent) -> CacheEvent | None:
        """Applies an event to the pages. Returns the consistent part of the event, or None."""
        match event:
            case Stored():
                return event if self._store(event) else None
            case Removed(hashes, group):
                known = [each for each in hashes if self._pages.pop((group, each), None)]
                return Removed(known, group) if known else None
            case Cleared():
                self._pages.clear()
                return event

    def _store(self, event: Stored) -> bool:
        parent, group, window, size = event.parent, event.group, event.window, event.page_size
        if parent is not None and window is None and (group, parent) not in self._pages:
            return False
        tokens = array("i", event.tokens)
        for number, content in enumerate(event.hashes):
            own = tokens[number * size : (number + 1) * size].tobytes()
            self._pages[group, content] = _Page(parent, own, event.salt, group, window)
            parent = content
        return True


def _stored_again(pages: list[tuple[tuple[int | None, bytes], _Page]]) -> Iterator[Stored]:
    """Yields pages as events. Each event has pages that follow each other in the list."""
    run: Stored | None = None
    for (group, content), page in pages:
        tokens = array("i", page.tokens).tolist()
        if run is not None and page.parent == run.hashes[-1] and group == run.group:
            run.hashes.append(content)
            run.source.extend(tokens)
            continue
        if run is not None:
            yield run
        size = len(tokens)
        run = Stored([content], page.parent, tokens, 0, size, page.salt, group, page.window)
    if run is not None:
        yield run
