"""Access control: every route needs an API key unless it is listed here as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.config import ServerConfig
from jaxserve.server.errors import ApiError
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.tenant import CURRENT_TENANT, KEY_NAME, tenant_of
from jaxserve.server.ui import OPEN_PAGES

OPEN_ROUTES = frozenset({"/health", "/live", "/ready"})
"""Routes that need no key, by the path of the matched route. All other requests need one, also
those for unknown routes. So a new route is closed by default."""

METRICS_ROUTES = frozenset({"/metrics", "/metrics/routing"})
RENDER_ROUTES = frozenset({"/v1/chat/completions/render", "/v1/completions/render"})
"""Scrapers and routers without keys call these routes. Flags can open them."""

ADMIN_ROUTES = frozenset(
    {
        *("/reset_prefix_cache", "/v1/weights", "/pause", "/resume", "/is_paused"),
        *("/sleep", "/wake_up"),
    }
)
"""These routes change the behaviour for all clients. They need an administrator's key, and do not
exist if the server has no such key."""


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests without a valid key, if the server has keys, before anything reads the body.
    Administrators' keys open every route.

    Raises:
      ApiError: 401 without a valid key, 403 for a client's key on an admin route.
    """
    config = request.app[SERVICE].config
    path = route_of(request)
    clients, admins = config.api_key_digests, config.admin_key_digests
    if path in ADMIN_ROUTES:
        key = _checked(request, clients + admins)
        if key not in admins:
            raise ApiError(403, "this route needs an administrator's key", code="not_admin")
    elif clients and not is_open(path, config):
        _checked(request, clients + admins)
    CURRENT_TENANT.set(tenant_of(request) or request.remote or "")
    return await handler(request)


def is_open(path: str | None, config: ServerConfig) -> bool:
    """Returns whether the route of this path answers without a key."""
    if path in METRICS_ROUTES:
        return config.open_metrics
    if path in RENDER_ROUTES:
        return config.open_render
    return path in OPEN_ROUTES or path in OPEN_PAGES


def service_of(request: web.Request) -> Service:
    """Returns the application's service. If caches are isolated by key, its tokenizer uses the
    caches of the request's key."""
    service = request.app[SERVICE]
    if not service.config.isolate_cache_by_key:
        return service
    return replace(service, tokenizer=service.tokenizer.for_tenant(tenant_of(request)))


def digest(key: str) -> bytes:
    """Returns a key's SHA-256. Keys are stored and compared as digests, which have equal
    lengths."""
    # Header bytes that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def route_of(request: web.Request) -> str | None:
    """Returns the path of the matched route without the root path; None: no route matched."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    path, root = resource.canonical, request.app[SERVICE].config.root_path
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _checked(request: web.Request, known: Iterable[bytes]) -> bytes:
    """Returns the digest of the request's key, and stores the key's name in the request."""
    given = [digest(key) for key in _given_keys(request)]
    if not given:
        raise ApiError(
            401,
            "an API key is required: send Authorization: Bearer KEY, or x-api-key: KEY",
            code="missing_api_key",
        )
    # No early exit: the time must not reveal which key was close.
    matching = [other for other in known for one in given if hmac.compare_digest(one, other)]
    if not matching:
        raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
    request[KEY_NAME] = matching[0].hex()[:8]
    return matching[0]


def _given_keys(request: web.Request) -> list[str]:
    """Returns the request's keys. OpenAI clients send a bearer token, Anthropic clients x-api-key,
    some clients both."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, request.headers.get("x-api-key", "")) if key]
