"""A server whose latencies are known: each request's course follows from its prompt's first token.

It counts what it was sent, so that a test can hold the client's account against it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Course:
    """What happens to a request. Times in seconds; `status` other than 200 answers at once."""

    ttft: float = 0.02
    gap: float = 0.01
    tokens: int = 5
    status: int = 200
    message: str = "busy"
    refuses_late: bool = False
    """The status is 200 and the stream begins with an error."""
    breaks_after: int | None = None
    """Tokens after which the connection ends without [DONE]."""
    chat: bool = False
    last: Any = None
    """Sent instead of the usage."""


@dataclass
class Mock:
    course: Callable[[dict[str, Any], int], Course]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    stop: Callable[[], Awaitable[None]] = field(init=False)
    """Answers nobody from then on."""
    max_model_len: int | None = None
    metrics: str = "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        arrived = asyncio.get_running_loop().time()
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        course = self.course(body, len(self.bodies) - 1)
        if course.status != 200:
            return web.json_response({"error": {"message": course.message}}, status=course.status)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        if course.refuses_late:
            error = {"message": course.message, "type": "service_unavailable_error"}
            await _send(reply, {"error": error})
            return reply
        if course.chat:
            await _send(reply, {"choices": [{"delta": {"role": "assistant"}}]})
        for index in range(course.tokens):
            if index == course.breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return reply
            await _until(arrived + course.ttft + index * course.gap)
            choice = {"delta": {"content": "x"}} if course.chat else {"text": "x"}
            await _send(reply, {"choices": [choice]})
        usage = {
            "prompt_tokens": len(body.get("prompt", "")),
            "completion_tokens": course.tokens,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        await _send(reply, course.last or {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")
        return reply


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))


async def _send(reply: web.StreamResponse, chunk: Any) -> None:
    await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def serving(course: Callable[[dict[str, Any], int], Course]) -> AsyncGenerator[Mock]:
    mock = Mock(course)
    app = web.Application(client_max_size=2**26)

    async def models(_: web.Request) -> web.Response:
        model = {"id": "mock", "max_model_len": mock.max_model_len}
        return web.json_response({"data": [{"id": "other"}, model]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=mock.metrics)

    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/v1/completions", mock.complete)
    app.router.add_post("/v1/chat/completions", mock.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    mock.url, mock.stop = f"http://{host}:{port}", runner.cleanup
    try:
        yield mock
    finally:
        await runner.cleanup()
