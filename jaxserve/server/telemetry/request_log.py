"""Reports a finished request as a log line and a span, never with its text."""

from __future__ import annotations

import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.server.access import route_of
from jaxserve.server.middleware import request_id
from jaxserve.server.output.generation import Choice, Generation
from jaxserve.server.reply import GENERATION
from jaxserve.server.service import SERVICE
from jaxserve.server.telemetry.finished import Finished, Timing
from jaxserve.server.tenant import KEY_NAME

log = logging.getLogger("jaxserve.requests")

MAX_PATH_CHARS = 200
CLIENT_GONE = 499
"""Status of a request whose client disconnected early (nginx's number)."""


@web.middleware
async def report_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reports a finished request as a log line and a span, if the server is configured to."""
    service = request.app[SERVICE]
    if not service.config.log_requests and service.tracer is None:
        return await handler(request)
    wall, begun, status = time.time(), time.perf_counter(), CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        generation = request.get(GENERATION)
        finished = Finished(
            id=request_id(request),
            method=request.method[:16],
            route=route_of(request),
            status=status,
            began=wall,
            seconds=time.perf_counter() - begun,
            headers=request.headers,
            generation=generation,
            timing=_timing(generation.choices[0] if generation else None, begun),
        )
        if service.config.log_requests:
            _log(request, finished)
        if service.tracer is not None and generation is not None:
            service.tracer.record(finished)


def _timing(choice: Choice | None, begun: float) -> Timing:
    if choice is None or (start := choice.start) is None:
        return Timing(None, None, None, None, None)
    decode = max(0.0, choice.last_token_at - start.on_host)
    itl = decode / (choice.num_tokens - 1) if choice.num_tokens > 1 else None
    return Timing(start.queued, start.prefill, start.on_host - begun, decode, itl)


def _log(request: web.Request, finished: Finished) -> None:
    times = finished.timing
    fields: dict[str, Any] = {
        "request_id": finished.id,
        "method": finished.method,
        "path": request.rel_url.raw_path[:MAX_PATH_CHARS],
        "status": finished.status,
        "seconds": finished.seconds,
        "client": request.remote,
        "key": request.get(KEY_NAME),
        **_counts(finished.generation),
        "queue_seconds": times.queue,
        "ttft_seconds": times.ttft,
        "itl_seconds": times.itl,
    }
    shown = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
    }
    text = " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
    log.info("%s", text, extra={"fields": shown})


def _counts(generation: Generation | None) -> dict[str, Any]:
    if generation is None:
        return {}
    reasons = [choice.reason or "abort" for choice in generation.choices]
    return {
        "finish_reason": ",".join(dict.fromkeys(reasons)),
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
    }
