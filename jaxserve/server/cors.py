"""Cross-origin requests (CORS): the web pages that browsers may let use the server."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from jaxserve.server.service import SERVICE

METHODS = "GET, POST, OPTIONS"
MAX_AGE = "600"
SHOWN_HEADERS = (
    "Retry-After, Retry-After-Ms, Server-Timing, X-Jaxserve-Ignored-Params, X-Request-Id"
)
"""Response headers that pages may read, such as the request's id and when to retry."""
DEFAULT_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a browser's preflight request, which carries no key. Origins that are not allowed get
    the answer of any other OPTIONS request.
    """
    asked = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    if request.method != "OPTIONS" or not asked or _allowed(request) is None:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        # Lists the headers, because `*` does not include Authorization.
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(
            hdrs.ACCESS_CONTROL_REQUEST_HEADERS, DEFAULT_HEADERS
        ),
        hdrs.ACCESS_CONTROL_MAX_AGE: MAX_AGE,
    }
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the header. It is a signal handler, so that it also reaches streams and errors."""
    origins = request.app[SERVICE].config.allowed_origins
    if origins and origins != ("*",):
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # caches must keep the origins apart
    if (origin := _allowed(request)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = SHOWN_HEADERS


def _allowed(request: web.Request) -> str | None:
    """Returns the allowed origin of the request. Never allows credentials such as cookies, which
    the server does not use."""
    origins = request.app[SERVICE].config.allowed_origins
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or not origins:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
