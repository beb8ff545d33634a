"""Facts about a request before its fields are read, and the scheduling hints in its headers."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from jaxserve.server.errors import invalid
from jaxserve.server.request.priority import Ranked, level_of, level_of_headers, tier_used
from jaxserve.server.request.schema import GenerationFields
from jaxserve.server.service import Service
from jaxserve.server.tenant import flow_of, isolated_salt, tenant_of

FIRST_TOKEN_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""llm-d's spelling, and that of benchmarks and older versions of llm-d. The first one wins."""
ANSWER_HEADER = "x-slo-e2e-ms"


class Standing(NamedTuple):
    """The tenant of a request, its priority, and its deadlines."""

    tenant: str
    priority: int
    cache_salt: str
    ttft_slo: float | None
    """Seconds to the first token."""
    e2e_slo: float | None
    """Seconds to the end of the answer."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Facts about a request before its fields are read."""

    service: Service
    request: web.Request
    at: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def tier(self, fields: Ranked) -> dict[str, Any]:
        """Returns the answer's fields about the request's service tier."""
        config = self.service.config
        level = level_of_headers(self.request.headers, config.objectives)
        return dict(tier_used(fields, level, by_priority=config.by_priority))

    def standing(self, fields: GenerationFields) -> Standing:
        """Returns the scheduling facts of a request. Raises ApiError if a header is invalid."""
        headers, config = self.request.headers, self.service.config
        tenant, salt = tenant_of(self.request), fields.cache_salt or ""
        level = level_of_headers(headers, config.objectives)
        first, whole = _seconds(headers, *FIRST_TOKEN_HEADERS), _seconds(headers, ANSWER_HEADER)
        flow = flow_of(headers) if config.trust_gateway else None
        return Standing(
            tenant=tenant if flow is None else flow,
            priority=level_of(fields) if level is None else level,
            # Caches are isolated by key, whatever tenant a gateway names.
            cache_salt=isolated_salt(tenant, salt) if config.isolate_cache_by_key else salt,
            ttft_slo=first,
            e2e_slo=config.request_timeout if whole is None else whole,
        )


def _seconds(headers: Mapping[str, str], *names: str) -> float | None:
    """Returns the seconds in the first present header of these, which are in milliseconds."""
    name = next((name for name in names if name in headers), None)
    if name is None:
        return None
    try:
        milliseconds = float(headers[name])
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise invalid(f"{name} must be a positive number of milliseconds", param=name)
    return milliseconds / 1e3
