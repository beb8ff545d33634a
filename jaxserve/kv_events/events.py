"""What happens to cached pages: the contract between the scheduler and whoever tells others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Stored(NamedTuple):
    """Consecutive pages of a sequence can be found from now on."""

    hashes: list[bytes]
    """Content hashes of the pages (`scheduler.prefix`), each not findable before."""
    parent: bytes | None
    """Hash of the page before the first one; None: there is none. Without a window it can be found,
    too."""
    source: list[int]
    """Token ids of the sequence, which only grow. Whoever is told copies what it needs, not the
    engine's thread: that would make events cost it half as much again."""
    start: int
    """Index of the first page's first token."""
    page_size: int
    salt: str
    """What keeps requests apart, see `api.Request.cache_salt`."""
    group: int | None
    """Cache group; None: the model has one, without a window."""
    window: int | None
    """The group's window in tokens; None: it has none."""

    @property
    def tokens(self) -> list[int]:
        """A copy of the token ids of all pages, concatenated."""
        return self.source[self.start : self.start + len(self.hashes) * self.page_size]


class Removed(NamedTuple):
    """Pages were allocated again: their hashes can no longer be found."""

    hashes: list[bytes]
    group: int | None


class Cleared(NamedTuple):
    """No page of any group can be found any more."""


type CacheEvent = Stored | Removed | Cleared

type Sink = Callable[[list[CacheEvent]], None]
"""Takes the events of a step, in their order. The lists of events are its own. Must neither wait
nor raise."""
