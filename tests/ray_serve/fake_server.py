"""A server for tests of what stands before it; its routes do as they are told."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

EVENTS = {"Content-Type": "text/event-stream"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--say", help="the last words of a server that does not start")
    parser.add_argument("--marks", type=Path, help="a folder for files that say what happened")
    args, _ = parser.parse_known_args()
    if args.say:
        print(args.say, file=sys.stderr)
        sys.exit(3)
    app = web.Application()
    marks: Path = args.marks or Path("/nowhere")

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"phase": "serving", "running": 3, "waiting": 4})

    async def echo(request: web.Request) -> web.Response:
        headers = {"X-Path": request.raw_path, "X-Request-Id": "its own", "X-Twice": "1"}
        answer = web.Response(status=418, body=await request.read(), headers=headers)
        answer.headers.add("X-Twice", "2")
        answer.headers["X-Asked"] = ",".join(sorted(name.lower() for name in request.headers))
        return answer

    async def steps(request: web.Request) -> web.StreamResponse:
        """A part, and the next one when a file is there."""
        answer = web.StreamResponse(headers=EVENTS)
        await answer.prepare(request)
        try:
            await answer.write(b"data: 1\n\n")
            while not (marks / "go on").exists():
                await asyncio.sleep(0.02)
            await answer.write(b"data: 2\n\n")
        except asyncio.CancelledError:
            (marks / "left").touch()
            raise
        return answer

    async def die(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers=EVENTS)
        await answer.prepare(request)
        await answer.write(b"data: 1\n\ndata: ha")
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
        return answer

    app.add_routes(
        [
            *(web.get("/ready", ready), web.get("/health", ready)),
            *(web.post("/echo", echo), web.post("/steps", steps), web.post("/die", die)),
        ]
    )
    web.run_app(app, path=args.uds, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
