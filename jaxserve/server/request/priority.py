"""The priority of a request: a number in its body or from a proxy, or an OpenAI service tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from jaxserve.server.errors import invalid
from jaxserve.server.request.schema import Tier

HEADER = "X-Vllm-Priority"
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""llm-d's header for the objective of a request; the second is that of older versions."""
LEVELS: Mapping[Tier, int] = {"flex": 1, "priority": -1, "fast": -1}
"""Priorities of tiers; lower goes first. Other tiers have 0."""

_INTEGER = re.compile(r"-?[0-9]{1,19}")


class Ranked(Protocol):
    """The fields of a request that set its priority."""

    priority: int | None
    service_tier: Tier | None


def level_of(fields: Ranked) -> int:
    """Returns the priority in the body. A number overrides a tier."""
    if fields.priority is not None:
        return fields.priority
    return 0 if fields.service_tier is None else LEVELS.get(fields.service_tier, 0)


def level_of_headers(headers: Mapping[str, str], objectives: Mapping[str, int]) -> int | None:
    """Returns the priority that a proxy asks for, which overrides the body: a number, or the
    priority of an objective. None: the proxy asks for none, or for an unknown objective.

    Args:
      objectives: priorities by name; higher goes first.

    Raises:
      ApiError: 400 if the number is not a 64-bit integer.
    """
    given = headers.get(HEADER)
    if given is None:
        named = (headers[name] for name in OBJECTIVE_HEADERS if name in headers)
        level = objectives.get(next(named, ""))
        return None if level is None else -level
    if not _INTEGER.fullmatch(given) or not -(2**63) <= int(given) < 2**63:
        raise invalid(f"{HEADER} must be an integer of 64 bits", param=HEADER)
    return int(given)


def tier_used(fields: Ranked, of_headers: int | None, *, by_priority: bool) -> dict[str, Tier]:
    """Returns the answer's `service_tier`, if the request has one. It is `default` unless the tier
    had an effect.

    Args:
      of_headers: the priority in the headers, if any.
      by_priority: whether the scheduling policy uses priorities.
    """
    tier = fields.service_tier
    if tier is None:
        return {}
    decided = by_priority and fields.priority is None and of_headers is None
    return {"service_tier": tier if decided and tier in LEVELS else "default"}
