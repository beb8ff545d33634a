"""Computes the number of replicas from their queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RUNNING, WAITING = "jaxserve_running", "jaxserve_waiting"
"""Statistics that replicas report, by the names that the policy reads."""

_MOST_GROWTH = 2.0


class Context(Protocol):
    """The fields of Serve's AutoscalingContext that the policy reads."""

    @property
    def current_num_replicas(self) -> int: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class QueuePolicy:
    """Serve's autoscaling policy. It asks for enough replicas for all running and waiting requests,
    and for more if requests still wait.

    Few requests with long contexts can fill the KV cache. Then only the waiting requests show that
    more replicas are needed. Like Kubernetes' autoscaler, the policy multiplies the running
    replicas by the ratio of waiting requests to the allowed number, at most 2. It does not count
    replicas that are starting, so that its result does not grow while they start. Serve applies
    limits and delays.
    """

    def __init__(self, *, target_requests: float, target_waiting: float):
        """Both targets are per replica: running plus waiting requests, and waiting requests
        alone."""
        self._target_requests = target_requests
        self._target_waiting = target_waiting

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Returns the wanted number of replicas, and no state."""
        reported = context.aggregated_metrics or {}
        running = sum(reported.get(RUNNING, {}).values())
        waiting = sum(reported.get(WAITING, {}).values())
        current = context.current_num_replicas
        if not current or not reported:
            return context.target_num_replicas, {}
        growth = waiting / current / self._target_waiting
        wanted = current * min(growth, _MOST_GROWTH) if growth > 1 else 0.0
        return max((running + waiting) / self._target_requests, wanted), {}
