"""How many replicas the queues need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RUNNING, WAITING = "jaxserve_running", "jaxserve_waiting"
"""What replicas report, by the names that the policy reads."""

_MOST_GROWTH = 2.0


class Context(Protocol):
    """What the policy reads of Serve's AutoscalingContext."""

    @property
    def current_num_replicas(self) -> int: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class QueuePolicy:
    """Serve's autoscaling policy: enough replicas for their running and waiting requests, and more
    while requests wait although there should be enough.

    Long contexts fill the KV cache with few requests: then only the waiting ones show that more
    replicas are needed. As Kubernetes' autoscaler does, it multiplies the replicas that run by
    what waits over what may wait, by 2 at most; replicas that are starting are not counted, so that
    the same wish does not grow while they start. Serve applies the limits and delays.
    """

    def __init__(self, *, target_requests: float, target_waiting: float):
        """Both are of a replica: running and waiting requests, and waiting ones."""
        self._target_requests = target_requests
        self._target_waiting = target_waiting

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Returns how many replicas there should be, and no state."""
        reported = context.aggregated_metrics or {}
        running = sum(reported.get(RUNNING, {}).values())
        waiting = sum(reported.get(WAITING, {}).values())
        current = context.current_num_replicas
        if not current or not reported:
            return context.target_num_replicas, {}
        growth = waiting / current / self._target_waiting
        wanted = current * min(growth, _MOST_GROWTH) if growth > 1 else 0.0
        return max((running + waiting) / self._target_requests, wanted), {}
