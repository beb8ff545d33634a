"""The engine's state for people who watch it: recent steps, pages, the waiting queue."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class StepView(NamedTuple):
    """One finished step, for people who watch."""

    number: int
    """Number of the step; the first finished step is 1."""
    kind: str
    """`decode`, `mixed` or `verify`."""
    bucket: int
    """Rows of a decode bucket, tokens of a mixed bucket, or positions of a verify bucket."""
    decode_rows: int
    chunks: int
    chunk_tokens: int
    """Prompt tokens that the chunks computed; in a verify step, the most drafts it could verify."""
    seconds: float | None
    """From the end of the previous step; None if the engine thread did not see both ends."""
    expected: float | None
    """Seconds by the step times measured at start; None without such times."""
    late: bool
    """The step was launched after the previous one had ended, so the device waited."""


class PageState(IntEnum):
    """The use of a page of the KV cache."""

    FREE = 0
    CACHED = 1
    """Free, and found by a prompt that begins with the same tokens."""
    HELD = 2
    """Held by one sequence."""
    SHARED = 3
    """Held by several sequences."""


class PagesView(NamedTuple):
    """The KV cache's pages on the device."""

    page_size: int
    """Tokens per page."""
    total: int
    free: int
    """Pages without a holder, cached ones included."""
    cached: int
    """Free pages whose content can be found."""
    stride: int
    """`states` has the first page and then every `stride`-th page."""
    states: bytes
    """One `PageState` per byte."""


class WaitingView(NamedTuple):
    """A sequence that waits for admission."""

    level: int
    """Its priority; 0 unless the policy uses priorities."""
    preempted: bool
    left: float | None
    """Seconds until the deadline of its first token; None without a deadline."""


class Occupancy(NamedTuple):
    """The sequences that hold the cache, and the waiting queue."""

    pages: PagesView
    waiting: tuple[WaitingView, ...]
