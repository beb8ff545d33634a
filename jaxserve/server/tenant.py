"""Whose request it is: what is shared fairly, or kept apart, is so by API key."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import sha256

from aiohttp import web

KEY_NAME = web.RequestKey("key_name", str)
"""Where a request keeps the first digits of its key's digest, for the log."""

FLOW_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Where llm-d's gateway says whose request it is, also as its older versions spell it."""
NO_FLOW = "default-flow"
"""llm-d's name for requests of nobody in particular."""

CURRENT_TENANT = ContextVar("current_tenant", default="")
"""Of the request that is being answered; without a key the address that it comes from."""

_SECRET = secrets.token_bytes(32)


def isolated_salt(tenant: str, salt: str) -> str:
    """Returns a cache salt that no other key has.

    The tenant stands in it under a name that only this process makes: hashes of pages and KV cache
    events depend on the salt, and whoever reads those must not be able to test guesses of a key.

    Args:
      tenant: see `tenant_of`.
      salt: the client's own, without a slash; may be empty.
    """
    alias = hmac.digest(_SECRET, tenant.encode(), "sha256").hex()[:16] if tenant else ""
    return f"{alias}/{salt}"


def tenant_of(request: web.Request) -> str:
    """Returns digits that stand for the request's key, checked or not; empty without a key."""
    headers = request.headers
    key = request.get(KEY_NAME, "") or headers.get("Authorization") or headers.get("x-api-key", "")
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""


def flow_of(headers: Mapping[str, str]) -> str | None:
    """Returns digits that stand for whom a gateway says a request is from; None: it does not say.
    Only a gateway that clients cannot go around may be believed."""
    flow = next((headers[name] for name in FLOW_HEADERS if name in headers), "")
    if flow in ("", NO_FLOW):
        return None
    return sha256(f"flow {flow}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
