"""A finished request, as input of logs and spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxserve.server.output.generation import Generation


class Timing(NamedTuple):
    """Times of one choice in seconds; None if it did not get that far."""

    queue: float | None
    prefill: float | None
    ttft: float | None
    """Time from the request's arrival to the first token."""
    decode: float | None
    itl: float | None
    """Mean time between tokens."""


class Finished(NamedTuple):
    """A finished request."""

    id: str
    method: str
    route: str | None
    """The route; None: no route matched."""
    status: int
    began: float
    """Time of arrival, as Unix time."""
    seconds: float
    headers: Mapping[str, str]
    generation: Generation | None
    timing: Timing
    """Times of the first choice."""


class Tracer(Protocol):
    """Receives the spans of requests."""

    def record(self, finished: Finished) -> None:
        """Records a request that generated, or was to generate. Returns at once."""
        ...
