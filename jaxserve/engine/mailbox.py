"""From one side that never waits to one that takes all there is."""

from __future__ import annotations

import asyncio


class Mailbox[T]:
    """A queue without a bound for one reader; both sides are on one event loop.

    A reader that was busy gets everything at once: under load that saves it a turn of the loop,
    and its client a packet, for each item.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: list[T] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Behind all that was put before."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[T]:
        """All that is there, at least one."""
        if not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        items, self._items = self._items, []
        return items
