"""What the event loop's side asks of the engine thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api import Request


class Submit(NamedTuple):
    request: Request


class Abort(NamedTuple):
    request_id: str


class ResetPrefixCache(NamedTuple):
    pass


type Order = Submit | Abort | ResetPrefixCache


class Inbox:
    """From any thread to the one that takes."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._wake = threading.Event()
        self._closed = False

    @property
    def num_submitted(self) -> int:
        """Requests that were not taken yet. For any thread."""
        orders = tuple(self._orders)  # at once: the other side takes meanwhile
        return sum(isinstance(order, Submit) for order in orders)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, order: Order) -> None:
        self._orders.append(order)
        self._wake.set()

    def close(self) -> None:
        """Whoever takes is to end."""
        self._closed = True
        self._wake.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until something comes after the last `take`; False: nothing came in time."""
        return self._wake.wait(timeout)

    def take(self) -> Iterator[Order]:
        """All that is there, oldest first."""
        self._wake.clear()
        while self._orders:
            yield self._orders.popleft()
