"""What the engine shows to people who watch it: its last steps, its pages, its queue."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class StepView(NamedTuple):
    """One finished step, for people who watch."""

    number: int
    """Counts finished steps from 1."""
    kind: str
    """`decode`, `mixed` or `verify`."""
    bucket: int
    """Rows of a decode bucket, tokens of a mixed one, positions of a verify bucket."""
    decode_rows: int
    chunks: int
    chunk_tokens: int
    """Prompt tokens that the chunks computed; drafts that a verify step might verify."""
    seconds: float | None
    """From the end of the step before it; None if the engine thread did not see both ends."""
    expected: float | None
    """Seconds by the times that the start measured; None without such times."""
    late: bool
    """It was launched after the step before it had ended: the device waited."""


class PageState(IntEnum):
    """What a page of the KV cache is."""

    FREE = 0
    CACHED = 1
    """Free, and a prompt that begins with its content finds it."""
    HELD = 2
    """By one sequence."""
    SHARED = 3
    """By several sequences."""


class PagesView(NamedTuple):
    """The KV cache's pages on the device."""

    page_size: int
    """Tokens."""
    total: int
    free: int
    """Without a holder, cached ones included."""
    cached: int
    """Free ones with content that can be found."""
    stride: int
    """`states` has the first page and every so-many-th one after it."""
    states: bytes
    """One `PageState` per byte."""


class WaitingView(NamedTuple):
    """One sequence that waits for admission."""

    level: int
    """Its priority; 0 unless the policy uses priorities."""
    preempted: bool
    left: float | None
    """Seconds until the deadline of its first token; None without one."""


class Occupancy(NamedTuple):
    """What holds the cache and the queue."""

    pages: PagesView
    waiting: tuple[WaitingView, ...]
