"""A load: pages in flight to the device, and the sequences that wait for them."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state_pieces import StatePieces


class State(enum.Enum):
    """The state of a page in a load."""

    ON_DISK = enum.auto()
    READING = enum.auto()
    """A read from disk to a host slot is in flight."""
    ON_HOST = enum.auto()
    """The page is in a host slot, which the load pins."""
    COPYING = enum.auto()
    """A copy to the load ring is in flight. When it ends, the host slot is unpinned."""
    ARRIVED = enum.auto()
    """The move from the ring to the page is launched in this turn, or was launched before."""
    GONE = enum.auto()
    """The page cannot be loaded."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadPage:
    """A page in flight."""

    group: GroupPages | StatePieces
    number: int
    """Index among the sequence's pages. A piece of state has the index of the page before it."""
    key: bytes
    page: int
    """Page on the device."""
    state: State
    host_slot: int = -1
    from_disk: bool = False
    """Whether this load had to read it from disk."""


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """Consecutive pages that are loaded for one or more sequences."""

    seq: Sequence
    """The sequence whose tokens the pages hold."""
    hashes: list[bytes]
    pages: list[LoadPage]
    """Pages in order of their numbers. Only pages before `end` are wanted."""
    held: list[list[int]]
    """For each group, the device pages that the load holds, in order."""
    snapshot: int | None
    """Reserved slot for the state after the last page."""
    waiting: list[Sequence]
    began: float
    predicted: float
    """Predicted duration in seconds."""
    end: int
    published: int = 0
    over: bool = False
    error: str = ""
    """Why pages from `end` on cannot be loaded."""
    keys: frozenset[bytes]


def key_of(group: int, content: bytes) -> bytes:
    """Returns the key of a page in lower tiers: 32 bytes."""
    return hashlib.sha256(content + bytes([group])).digest() if group else content
