"""A request that has ended, as logs and spans tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxserve.server.output.generation import Generation


class Timing(NamedTuple):
    """Times of one choice, in seconds; None where it did not come so far."""

    queue: float | None
    prefill: float | None
    ttft: float | None
    """From the request's arrival."""
    decode: float | None
    itl: float | None
    """The mean."""


class Finished(NamedTuple):
    """A request that has ended."""

    id: str
    method: str
    route: str | None
    """None: there is no such route."""
    status: int
    began: float
    """Unix time."""
    seconds: float
    headers: Mapping[str, str]
    generation: Generation | None
    timing: Timing
    """Of the first choice."""


class Tracer(Protocol):
    """Where spans of requests go."""

    def record(self, finished: Finished) -> None:
        """Records a request that generated, or was to. Returns at once."""
        ...
