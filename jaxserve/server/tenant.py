"""The tenant of a request: an API key. Fair sharing and isolation are between tenants."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import sha256

from aiohttp import web

KEY_NAME = web.RequestKey("key_name", str)
"""The first digits of the digest of the request's key, for the log."""

FLOW_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers in which llm-d's gateway names the tenant; the second is that of older versions."""
NO_FLOW = "default-flow"
"""llm-d's name for requests without a tenant."""

CURRENT_TENANT = ContextVar("current_tenant", default="")
"""The tenant of the current request; without a key, the address of the client."""

_SECRET = secrets.token_bytes(32)


def isolated_salt(tenant: str, salt: str) -> str:
    """Returns a cache salt that no other key has.

    It contains the tenant under a name that only this process can compute. Page hashes and KV cache
    events depend on the salt, and their readers must not be able to test guesses of a key.

    Args:
      tenant: see `tenant_of`.
      salt: the client's own, without a slash; may be empty.
    """
    alias = hmac.digest(_SECRET, tenant.encode(), "sha256").hex()[:16] if tenant else ""
    return f"{alias}/{salt}"


def tenant_of(request: web.Request) -> str:
    """Returns digits that identify the request's key, valid or not; empty without a key."""
    headers = request.headers
    key = request.get(KEY_NAME, "") or headers.get("Authorization") or headers.get("x-api-key", "")
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""


def flow_of(headers: Mapping[str, str]) -> str | None:
    """Returns digits that identify the tenant that a gateway names; None: it names none. Trust this
    only if clients cannot bypass the gateway."""
    flow = next((headers[name] for name in FLOW_HEADERS if name in headers), "")
    if flow in ("", NO_FLOW):
        return None
    return sha256(f"flow {flow}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
