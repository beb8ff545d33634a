"""Translates failures of the engine into errors for clients."""

from __future__ import annotations

from jaxserve.api import EngineFailed, Overloaded, ReaderTooSlow, Rejected
from jaxserve.server.errors import ApiError, engine_error, invalid
from jaxserve.server.output.generation import GrammarLeft
from jaxserve.server.service import Service

_RESTART_SECONDS = 5.0
"""Seconds after which a client may retry on a server that is restarting."""


def api_error(service: Service, error: Rejected | Overloaded | EngineFailed) -> ApiError:
    """Translates a failure, using the request and the state of the server."""
    if isinstance(error, GrammarLeft):
        # Not a 500: clients would retry and meet the limit again.
        return invalid(
            f"the grammar met a limit after {error.num_tokens} tokens: there are too many ways to "
            "read the output so far. Left-recursive rules and fewer nested repetitions need less",
            code="grammar_limit",
        )
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, f"the answer was cancelled: {error}", code="slow_reader")
    status = service.engine.status()
    accepting = status.ready and status.phase != "draining"
    if isinstance(error, EngineFailed) and status.phase == "draining":
        message = "the server is shutting down, this request was not finished"
        return ApiError(503, message, code="not_ready", retry_after=_RESTART_SECONDS)
    if isinstance(error, EngineFailed) and status.phase != "failed":
        return ApiError(500, "the engine could not finish this request", code="generation_failed")
    answer = engine_error(error, accepting=accepting)
    if answer.status == 429:
        answer.retry_after = service.backlog.seconds_to_drain()
    return answer
