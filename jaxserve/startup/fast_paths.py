"""Logs which fast paths are off, and why."""

from __future__ import annotations

import logging

from jaxserve.metrics.metrics import Metrics
from jaxserve_kernels import fallback
from jaxserve_kernels.fast_paths import fast_paths
from jaxserve_kernels.target import Target

log = logging.getLogger(__name__)


def report(metrics: Metrics, target: Target) -> None:
    """Logs one line for each fast path that is off on this GPU, as a warning if it could be on.
    Also sets the metric."""
    for path in fast_paths(target=target):
        metrics.set_fast_path(path.feature, on=path.why_off is None)
        if path.why_off is not None:
            level = logging.INFO if path.by_design else logging.WARNING
            log.log(level, "%s: off, steps are slower: %s", path.feature, path.why_off)
    for operation in fallback.fallen_back():  # the reason is already in the log
        metrics.set_fallback(operation)
