"""Cross-origin requests: which web pages a browser lets use the server."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from jaxserve.server.service import SERVICE

METHODS = "GET, POST, OPTIONS"
MAX_AGE = "600"
SHOWN_HEADERS = (
    "Retry-After, Retry-After-Ms, Server-Timing, X-Jaxserve-Ignored-Params, X-Request-Id"
)
"""Of answers; else a page could read neither an answer's id nor when to come back."""
DEFAULT_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a browser's preflight request, which carries no key. Origins that are not allowed get
    what any OPTIONS request gets.

    Only for origins that are allowed; others get what any OPTIONS request gets.
    """
    asked = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    if request.method != "OPTIONS" or not asked or _allowed(request) is None:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        # By name: `*` does not cover Authorization.
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(
            hdrs.ACCESS_CONTROL_REQUEST_HEADERS, DEFAULT_HEADERS
        ),
        hdrs.ACCESS_CONTROL_MAX_AGE: MAX_AGE,
    }
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the header. As a signal handler it reaches streams and errors, too."""
    origins = request.app[SERVICE].config.allowed_origins
    if origins and origins != ("*",):
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # caches must keep the answers apart
    if (origin := _allowed(request)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = SHOWN_HEADERS


def _allowed(request: web.Request) -> str | None:
    """Cookies and the like are never allowed: the server has no use for them."""
    origins = request.app[SERVICE].config.allowed_origins
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or not origins:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
