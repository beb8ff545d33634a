"""A load: pages on their way back to the device, and who waits for them."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state_pieces import StatePieces


class State(enum.Enum):
    """Of a page of a load."""

    ON_DISK = enum.auto()
    READING = enum.auto()
    """From disk into a host slot."""
    ON_HOST = enum.auto()
    """In a host slot, which the load pins."""
    COPYING = enum.auto()
    """To the load ring. The copy's end unpins the host slot."""
    ARRIVED = enum.auto()
    """The move from the ring into the page is launched with this turn's, or was before."""
    GONE = enum.auto()
    """It does not come."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadPage:
    """A page that is on its way."""

    group: GroupPages | StatePieces
    number: int
    """Of the sequence's pages; of a piece of state that of the page before it."""
    key: bytes
    page: int
    """On the device."""
    state: State
    host_slot: int = -1
    from_disk: bool = False
    """It had to be read for this load."""


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """A run of pages that comes back for one sequence or several."""

    seq: Sequence
    """Whose tokens they hold."""
    hashes: list[bytes]
    pages: list[LoadPage]
    """In order of their numbers; those before `end` are wanted."""
    held: list[list[int]]
    """For each group the pages that the load holds on the device, in order."""
    snapshot: int | None
    """The slot that it has reserved for the state behind the last page."""
    waiting: list[Sequence]
    began: float
    predicted: float
    """Seconds."""
    end: int
    published: int = 0
    over: bool = False
    error: str = ""
    """Why pages from `end` on do not come."""
    keys: frozenset[bytes]


def key_of(group: int, content: bytes) -> bytes:
    """Returns the key of a page below the device: 32 bytes."""
    return hashlib.sha256(content + bytes([group])).digest() if group else content
