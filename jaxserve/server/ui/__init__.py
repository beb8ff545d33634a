"""The web pages: a chat at `/`, and the engine's state at `/ui/engine`.

They are plain files without a build step. They load nothing from other servers, and use this
server's own API with the key that the user types in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import hdrs, web

import jaxserve
from jaxserve.server.ui.live import LIVE, live_events

OPEN_PAGES = frozenset({"/", "/ui/engine", "/ui/{file}"})
"""Routes that need no key. They return only these files, nothing about the server."""

EVENTS_ROUTE = "/ui/engine/events"

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_THEME = Path(jaxserve.__file__).with_name("theme.css")
"""The style of all pages, including the bench's."""

type _Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ui_routes(prefix: str) -> list[web.RouteDef]:
    """Returns the routes of the pages under a path. Reads the files now."""
    files = _files()
    return [
        web.get(f"{prefix}/", _shows(files["index.html"])),
        web.get(f"{prefix}/ui/engine", _shows(files["engine.html"])),
        web.get(f"{prefix}{EVENTS_ROUTE}", live_events, allow_head=False),
        web.get(f"{prefix}/ui/{{file}}", _shows_named(files)),
    ]


class _File:
    """A file of the pages, with the headers of its answers."""

    def __init__(self, path: Path):
        self.body = path.read_bytes()
        self.headers = {
            **_HEADERS,
            hdrs.CONTENT_TYPE: f"{_TYPES[path.suffix]}; charset=utf-8",
            hdrs.ETAG: f'"{hashlib.sha256(self.body).hexdigest()[:32]}"',
        }

    def answer(self, request: web.Request) -> web.Response:
        """Answers with the file, or with 304 if the browser has it."""
        tags = request.headers.get(hdrs.IF_NONE_MATCH, "")
        if self.headers[hdrs.ETAG] in tags:
            return web.Response(status=304, headers=self.headers)
        return web.Response(body=self.body, headers=self.headers)


def _files() -> dict[str, _File]:
    paths = [*Path(__file__).parent.iterdir(), _THEME]
    return {path.name: _File(path) for path in paths if path.suffix in _TYPES}


def _shows(file: _File) -> _Handler:
    async def handler(request: web.Request) -> web.Response:
        return file.answer(request)

    return handler


def _shows_named(files: dict[str, _File]) -> _Handler:
    async def handler(request: web.Request) -> web.Response:
        file = files.get(request.match_info["file"])
        if file is None:
            raise web.HTTPNotFound
        return file.answer(request)

    return handler


__all__ = ["EVENTS_ROUTE", "LIVE", "OPEN_PAGES", "ui_routes"]
