"""Stores responses in memory for a while, so that later requests can refer to them by id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ENTRY_BYTES = 1024
"""Approximate bytes of an entry besides its texts."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One response and the conversation before it, as JSON."""

    response: bytes
    input: Sequence[bytes]
    """Items of the earlier requests, and of the responses between them."""
    output: Sequence[bytes]

    @cached_property
    def size(self) -> int:
        """Approximate bytes that the response takes in memory."""
        items = [*self.input, *self.output]
        return ENTRY_BYTES + len(self.response) + sum(map(len, items)) + 64 * len(items)


class ResponseStore:
    """Keeps up to a number of bytes. When full, it drops the least recently used response of the
    tenant that uses the most. A tenant sees only its own responses. Thread-safe."""

    def __init__(self, most_bytes: int):
        """`most_bytes`: the limit; 0: nothing is stored."""
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._tenants: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}

    @property
    def on(self) -> bool:
        return self.most_bytes > 0

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """Stores a response, unless it alone exceeds the limit."""
        if stored.size > self.most_bytes:
            return
        with self._lock:
            self._tenants.setdefault(tenant, OrderedDict())[response_id] = stored
            self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
            while self.size > self.most_bytes:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._remove(largest, next(iter(self._tenants[largest])))

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """Returns a tenant's stored response, or None."""
        with self._lock:
            stored = self._tenants.get(tenant, {}).get(response_id)
            if stored is not None:
                self._tenants[tenant].move_to_end(response_id)
            return stored

    def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response. Returns whether it existed."""
        with self._lock:
            there = response_id in self._tenants.get(tenant, {})
            if there:
                self._remove(tenant, response_id)
            return there

    def _remove(self, tenant: str, response_id: str) -> None:
        removed = self._tenants[tenant].pop(response_id)
        self._sizes[tenant] -= removed.size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]
