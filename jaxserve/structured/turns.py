"""Turns at a scarce resource, fair to tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """A number of turns at a time. One tenant gets at most all but one, so that the next tenant
    need not wait for it. Waiting requests get turns tenant by tenant. Used on the event loop."""

    def __init__(self, most: int):
        self._free = most
        self._most_of_one = max(1, most - 1)
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Number of grammars that wait to be compiled."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, tenant: str, patience: float) -> AsyncGenerator[None]:
        """Holds a turn during the block. Raises TimeoutError after `patience` seconds without
        one."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        self._give()
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(future)  # the code below must see who has left
        except BaseException:
            self._forget(tenant, future)
            if future.done():
                self._take_back(tenant)
            raise
        try:
            yield
        finally:
            self._take_back(tenant)

    def _take_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        self._taken += Counter()  # removes entries of zero
        self._give()

    def _give(self) -> None:
        """Gives free turns to waiting requests."""
        for tenant in list(self._waiting):
            if self._free and self._taken[tenant] < self._most_of_one:
                future = self._waiting[tenant].popleft()
                self._waiting.move_to_end(tenant)
                self._forget(tenant, future)
                self._free -= 1
                self._taken[tenant] += 1
                future.set_result(None)

    def _forget(self, tenant: str, future: asyncio.Future[None]) -> None:
        """Removes a request that no longer waits."""
        queue = self._waiting.get(tenant, deque())
        if future in queue:
            queue.remove(future)
        if not queue:
            self._waiting.pop(tenant, None)
