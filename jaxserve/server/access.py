"""Who may ask: API keys, on every route that is not listed here as open."""

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
"""Answered without a key, by the path of the route that was matched. Everything else, routes that
do not exist included, needs one: a route that is added later is closed by itself."""

METRICS_ROUTES = frozenset({"/metrics", "/metrics/routing"})
RENDER_ROUTES = frozenset({"/v1/chat/completions/render", "/v1/completions/render"})
"""Scrapers and routers that send no keys ask these: opened by flags."""

ADMIN_ROUTES = frozenset(
    {
        *("/reset_prefix_cache", "/v1/weights", "/pause", "/resume", "/is_paused"),
        *("/sleep", "/wake_up"),
    }
)
"""They change what all clients get: only for keys of administrators, and not there without any."""


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests without a key that the server knows, if it knows any, before anything reads
    the body: 401, and 403 for a client's key on a route of administrators. Keys of administrators
    open every route.

    Raises:
      ApiError: 401 without a valid key, 403 for a client's key on a route of administrators.
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
    """Says whether the route of this path answers without a key."""
    if path in METRICS_ROUTES:
        return config.open_metrics
    if path in RENDER_ROUTES:
        return config.open_render
    return path in OPEN_ROUTES or path in OPEN_PAGES


def service_of(request: web.Request) -> Service:
    """Returns the service of the application. Where caches are isolated by key, its tokenizer uses
    those of this request's key."""
    service = request.app[SERVICE]
    if not service.config.isolate_cache_by_key:
        return service
    return replace(service, tokenizer=service.tokenizer.for_tenant(tenant_of(request)))


def digest(key: str) -> bytes:
    """Returns a key's SHA-256. Keys are kept and compared as digests, which have one length."""
    # Bytes of headers that are not UTF-8 come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def route_of(request: web.Request) -> str | None:
    """Returns the path of the route that was matched, without the root path; None: no route was."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    path, root = resource.canonical, request.app[SERVICE].config.root_path
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _checked(request: web.Request, known: Iterable[bytes]) -> bytes:
    """The digest of the key that the request carries; the request keeps its name."""
    given = [digest(key) for key in _given_keys(request)]
    if not given:
        raise ApiError(
            401,
            "an API key is required: send Authorization: Bearer KEY, or x-api-key: KEY",
            code="missing_api_key",
        )
    # No early exit: the time must not tell which key was close.
    matching = [other for other in known for one in given if hmac.compare_digest(one, other)]
    if not matching:
        raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
    request[KEY_NAME] = matching[0].hex()[:8]
    return matching[0]


def _given_keys(request: web.Request) -> list[str]:
    """OpenAI's clients send a bearer token, Anthropic's x-api-key, some of them both."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, request.headers.get("x-api-key", "")) if key]
