"""A server that answers as others do: it replays `recordings/other_servers.jsonl` with its times.

The first line of the file tells its format. A request asks for the answer whose name is its prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDING = Path(__file__).parent / "recordings" / "other_servers.jsonl"


def answers(endpoint: str) -> list[dict[str, Any]]:
    """The recorded answers of `chat` or `completions`."""
    _, *lines = RECORDING.read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["endpoint"] == endpoint]


@dataclass
class Replay:
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    """By name of the answer."""


@asynccontextmanager
async def replaying(endpoint: str) -> AsyncGenerator[Replay]:
    replay = Replay()
    by_name = {answer["name"]: answer for answer in answers(endpoint)}
    clock = asyncio.get_running_loop().time

    async def answer(request: web.Request) -> web.StreamResponse:
        arrived = clock()
        body = await request.json()
        name = body["messages"][0]["content"] if endpoint == "chat" else body["prompt"]
        replay.asked[name] += 1
        return await _send(request, by_name[name], lambda: clock() - arrived)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "recorded"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    replay.url = f"http://{host}:{port}"
    try:
        yield replay
    finally:
        await runner.cleanup()


async def _send(
    request: web.Request, answer: dict[str, Any], clock: Callable[[], float]
) -> web.StreamResponse:
    reply = web.StreamResponse(status=answer["status"], headers=answer["headers"])
    await reply.prepare(request)
    for when, what in answer["writes"]:
        await asyncio.sleep(max(0.0, when - clock()))
        event = what if isinstance(what, str) else f"data: {json.dumps(what)}\n\n"
        await reply.write(event.encode())
    if answer["end"] == "cut":
        assert request.transport is not None
        request.transport.abort()
    return reply
