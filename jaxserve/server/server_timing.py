"""The header `Server-Timing`: the parts of the time to first token."""

from __future__ import annotations

from jaxserve.server.arrival import Arrival
from jaxserve.server.output.generation import Choice, Generation


def server_timing(arrival: Arrival, generation: Generation, choice: Choice) -> dict[str, str]:
    """Returns the header `Server-Timing` with the parts of the time to first token."""
    start = choice.start
    if start is None:
        return {}
    parts = {
        "tokenize": generation.tokenizing,
        "queue": start.queued,
        "prefill": start.prefill,
        "ttft": start.on_host - arrival.at,
    }
    shown = ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in parts.items())
    return {"Server-Timing": shown}
