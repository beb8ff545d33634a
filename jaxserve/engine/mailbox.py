"""A bounded queue from a producer that never waits to one reader that takes everything."""

from __future__ import annotations

import asyncio


class Mailbox[T]:
    """A queue with one reader. Producer and reader run on the same event loop.

    A reader takes all items at once. Under load that saves one turn of the loop and one network
    packet per item. The size limit protects against clients that stop reading.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_size: int):
        """`max_size`: the largest sum of the waiting items' sizes, as given to `put`."""
        self._loop = loop
        self._max_size = max_size
        self._items: list[T] = []
        self._size = 0
        self._reader: asyncio.Future[None] | None = None
        """Set while a reader waits, or is woken but has not run yet."""

    def put(self, item: T, size: int = 0) -> bool:
        """Appends an item. Returns False if the mailbox is over its limit and no reader waits."""
        self._items.append(item)
        self._size += size
        if self._reader is None:
            return self._size <= self._max_size
        if not self._reader.done():
            self._reader.set_result(None)
        return True

    def replace(self, item: T) -> None:
        """Drops all waiting items and puts this one in their place."""
        self._items, self._size = [item], 0

    async def take(self) -> list[T]:
        """Waits for at least one item; returns all items."""
        if not self._items:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items, self._size = self._items, [], 0
        return items
