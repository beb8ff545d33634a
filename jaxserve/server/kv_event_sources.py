"""GET /kv_event_sources: the endpoints of KV cache events for routers, in vLLM's format."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.errors import json_response
from jaxserve.server.service import SERVICE


def routes(prefix: str) -> list[web.RouteDef]:
    """Returns the route below a path."""
    return [web.get(f"{prefix}/kv_event_sources", kv_event_sources)]


async def kv_event_sources(request: web.Request) -> web.Response:
    """GET /kv_event_sources: the publisher's settings by data-parallel rank; `{}` without one."""
    return json_response(dict(request.app[SERVICE].config.kv_event_sources))
