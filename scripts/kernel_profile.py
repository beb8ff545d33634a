"""Profiles a program: the kernels that it runs, and the time that each of them adds."""

from __future__ import annotations

import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax


class KernelRun(NamedTuple):
    """One run of a kernel. Times are in microseconds."""

    name: str
    """The name in the source, without the numbers that XLA appends."""
    us: float
    """From its start to its end. In a PDL chain that includes waiting for earlier kernels."""
    adds_us: float
    """From the end of the previous kernel, or from its own start if that is later, to its end."""


def kernel_runs(run: Callable[[], object]) -> list[KernelRun]:
    """Runs the function and waits for its kernels. Returns them in the order in which they end."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready(run())
        trace = next(Path(folder).rglob("perfetto_trace.json.gz"))
        return runs_of(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])


def runs_of(events: Sequence[Mapping[str, Any]]) -> list[KernelRun]:
    """The kernels among the events of a trace."""
    cards = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]
    }
    kernels = [
        (event["ts"] + event["dur"], event["dur"], event["name"])
        for event in events
        if event.get("pid") in cards and "correlation_id" in event.get("args", {})
    ]
    found: list[KernelRun] = []
    before = 0.0
    for end, us, name in sorted(kernels):
        found.append(KernelRun(re.sub(r"(_\d+)+$", "", name), us, min(us, end - before)))
        before = end
    return found


def per_layer(runs: Sequence[KernelRun], layers: int) -> dict[str, float]:
    """The median microseconds of each kernel in a layer; of one that a layer has several times,
    those of its first, second and so on."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for each in runs:
        times[each.name].append(each.us)
    found = {}
    for name, every in sorted(times.items()):
        count = max(1, len(every) // layers)
        for index in range(count):
            label = name if count == 1 else f"{name} {index + 1}"
            found[label] = round(median(every[index::count]), 2)
    return found
