"""Responses that are kept for a while, in memory: those that later requests name by their ids."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ENTRY_BYTES = 1024
"""What an entry takes beside its texts, about."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One response, and the conversation up to it, as JSON."""

    response: bytes
    input: Sequence[bytes]
    """Items of the requests that led to it, and of the responses between them."""
    output: Sequence[bytes]

    @cached_property
    def size(self) -> int:
        """Bytes that the response takes in memory, about."""
        items = [*self.input, *self.output]
        return ENTRY_BYTES + len(self.response) + sum(map(len, items)) + 64 * len(items)


class ResponseStore:
    """Keeps at most so many bytes. When full, it drops the least recently used response of the
    tenant that has most. A tenant sees only its own responses. Thread-safe."""

    def __init__(self, most_bytes: int):
        """0: nothing is kept."""
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
        """Keeps a response, unless it is larger than all the room."""
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
        """Forgets a response, and says whether it was there."""
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
