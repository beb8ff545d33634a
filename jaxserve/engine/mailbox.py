"""From one side that never waits to one that takes all there is."""

from __future__ import annotations

import asyncio


class Mailbox[T]:
    """A queue for one reader; both sides are on one event loop.

    A reader that was busy gets everything at once: under load that saves it a turn of the loop,
    and its client a packet, for each item. One that is kept from reading, by a client that takes
    nothing, may let so much wait and no more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int):
        """`most` is the size of what may wait, by what `put` is told."""
        self._loop = loop
        self._most = most
        self._items: list[T] = []
        self._size = 0
        self._reader: asyncio.Future[None] | None = None
        """Of a reader that waits, or was woken and had no turn yet."""

    def put(self, item: T, size: int = 0) -> bool:
        """Behind all that was put before. False: too much waits that nobody comes to take."""
        self._items.append(item)
        self._size += size
        if self._reader is None:
            return self._size <= self._most
        if not self._reader.done():
            self._reader.set_result(None)
        return True

    def replace(self, item: T) -> None:
        """All that waits is dropped, for this."""
        self._items, self._size = [item], 0

    async def take(self) -> list[T]:
        """All that is there, at least one."""
        if not self._items:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items, self._size = self._items, [], 0
        return items
