"""The server's own figures during a run, from its `/metrics` (vLLM's names)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.client import Target

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "jaxserve_compiles_total": "compiles",
}


class Sample(NamedTuple):
    """One sample. `values` has the known metrics that the server exports, summed over labels."""

    time: float
    """Seconds from the start of the run."""
    values: dict[str, float]


def parse(text: str) -> dict[str, float]:
    """Returns the known metrics in a text of Prometheus's format."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _NAMES.get(sample.name)
            if name == "compiles" and sample.labels.get("phase") != "serving":
                continue
            if name is not None:
                values[name] = values.get(name, 0.0) + sample.value
    return values


async def watch(
    session: aiohttp.ClientSession,
    target: Target,
    samples: list[Sample],
    interval: float,
    clock: Callable[[], float],
) -> None:
    """Appends a sample every `interval` seconds until cancelled. A server may have no metrics."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    while True:
        try:
            async with session.get(f"{target.url}/metrics", headers=headers) as reply:
                if reply.status != 200:
                    return
                text = await reply.text()
            samples.append(Sample(clock(), parse(text)))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            pass  # the next sample may work; the timeline shows the gap
        await asyncio.sleep(interval)
