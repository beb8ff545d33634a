"""Who may ask: API keys, on every route that is not listed here as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.server.errors import ApiError
from jaxserve.server.service import SERVICE

KEY_NAME = web.RequestKey("key_name", str)
"""Where a request keeps the first digits of its key's digest, for the log."""

OPEN_ROUTES = frozenset({"/health", "/ready"})
"""Answered without a key, by the path of the route that was matched. Everything else, routes that
do not exist included, needs one: a route that is added later is closed by itself."""


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """401 without one of the server's keys, if it has any, before anything reads the body."""
    config = request.app[SERVICE].config
    if config.api_key_digests and not _is_open(request, metrics_too=config.open_metrics):
        request[KEY_NAME] = _check_key(request, config.api_key_digests)
    return await handler(request)


def digest(key: str) -> bytes:
    """Keys are kept and compared as SHA-256: of one length, whatever the client sends."""
    # Bytes of headers that are not UTF-8 come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_open(request: web.Request, *, metrics_too: bool) -> bool:
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else None
    return path in OPEN_ROUTES or (metrics_too and path == "/metrics")


def _check_key(request: web.Request, known: Iterable[bytes]) -> str:
    given = [digest(key) for key in _given_keys(request)]
    if not given:
        raise ApiError(
            401,
            "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            code="missing_api_key",
        )
    # No early exit: the time must not tell which key was close.
    matching = [other for other in known for one in given if hmac.compare_digest(one, other)]
    if not matching:
        raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
    return matching[0].hex()[:8]


def _given_keys(request: web.Request) -> list[str]:
    """OpenAI's clients send a bearer token, Anthropic's x-api-key, some of them both."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, request.headers.get("x-api-key", "")) if key]
