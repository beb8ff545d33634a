"""Whose request it is: what is shared fairly, or kept apart, is so by API key."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import sha256

from aiohttp import web

KEY_NAME = web.RequestKey("key_name", str)
"""Where a request keeps the first digits of its key's digest, for the log."""

CURRENT_TENANT = ContextVar("current_tenant", default="")
"""Of the request that is being answered; without a key the address that it comes from."""


def tenant_of(request: web.Request) -> str:
    """Returns digits that stand for the request's key, checked or not; empty without a key."""
    headers = request.headers
    key = request.get(KEY_NAME, "") or headers.get("Authorization") or headers.get("x-api-key", "")
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""
