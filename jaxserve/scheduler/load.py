"""A load: pages on their way back to the device, and who waits for them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.sequence import Sequence


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

    group: GroupPages
    number: int
    """Of the sequence's pages."""
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
