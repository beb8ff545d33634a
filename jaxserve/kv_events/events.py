"""Events of cached pages: the contract between the scheduler and publishers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Stored(NamedTuple):
    """Consecutive pages of a sequence that can be found from now on."""

    hashes: list[bytes]
    """Content hashes of the pages (`scheduler.prefix`). None of them could be found before."""
    parent: bytes | None
    """Hash of the page before the first one; None: there is none. In a group without a window, that
    page can be found too."""
    source: list[int]
    """Token ids of the sequence; the list only grows. The reader copies its part. If the engine
    thread copied, events would cost it half as much again."""
    start: int
    """Index of the first token of the first page."""
    page_size: int
    salt: str
    """Separates the caches of requests, see `api.Request.cache_salt`."""
    group: int | None
    """Cache group; None: the model has a single group without a window."""
    window: int | None
    """The group's window in tokens; None: no window."""

    @property
    def tokens(self) -> list[int]:
        """A copy of the token ids of all these pages, concatenated."""
        return self.source[self.start : self.start + len(self.hashes) * self.page_size]


class Removed(NamedTuple):
    """Pages that were allocated again. Their hashes can no longer be found."""

    hashes: list[bytes]
    group: int | None


class Cleared(NamedTuple):
    """No page of any group can be found any more."""


type CacheEvent = Stored | Removed | Cleared

type Sink = Callable[[list[CacheEvent]], None]
"""Takes the events of a step, in order, and owns the lists. Must not wait or raise."""
