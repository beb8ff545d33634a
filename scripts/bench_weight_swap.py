"""Swaps the weights while streams run, and measures the load time and the gap in the streams.

    python scripts/random_checkpoint.py qwen3-4b /tmp/qwen3-4b
    python scripts/bench_weight_swap.py --model /tmp/qwen3-4b --json swap.json

The new weights are from the same folder, which costs the same as any others. The mode `beside`
needs memory for two sets of weights; set --kv-cache-memory-bytes so that it is free.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxserve.api import Running, SamplingParams, WeightChange
from jaxserve.library import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=3, help="swaps of each kind")
    parser.add_argument("--kv-cache-memory-bytes", default="24Gi")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--cache-dir", help="for compiled programs; default: the server's")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    flags = {"kv_cache_memory_bytes": options.kv_cache_memory_bytes}
    if options.cache_dir:
        flags["cache_dir"] = options.cache_dir
    with Engine(options.model, max_model_len=options.max_model_len, **flags) as engine:
        figures = asyncio.run(measure(engine, options))
    result = environment() | {"model": options.model, "streams": options.streams} | figures
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


async def measure(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds between tokens without a change, and the durations of each change."""
    arrivals: dict[int, list[float]] = {number: [] for number in range(options.streams)}
    tokens = options.max_model_len // 2
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)

    async def stream(number: int) -> None:
        while True:
            async for _ in engine.stream([number + 1] * 32, params):
                arrivals[number].append(time.perf_counter())

    streams = [asyncio.create_task(stream(number)) for number in arrivals]
    while not all(arrivals.values()):
        await asyncio.sleep(0.01)
        for task in streams:
            if task.done():
                task.result()
    begun = time.perf_counter()
    await asyncio.sleep(3.0)
    undisturbed = gaps(arrivals, begun, time.perf_counter())
    changes: list[dict[str, Any]] = []
    for in_place in (False, True):
        for running in (Running.CONTINUE, Running.RESTART):
            for _ in range(options.swaps):
                change = WeightChange(options.model, running=running, in_place=in_place)
                begun = time.perf_counter()
                done = await asyncio.to_thread(engine.load_weights, change)
                await asyncio.sleep(1.0)
                seen = gaps(arrivals, begun, time.perf_counter())
                longest, at = max(seen)
                changes.append(
                    {
                        "in_place": in_place,
                        "running": running.value,
                        "load_seconds": round(done.load_seconds, 3),
                        "between_steps_seconds": round(done.gap_seconds, 4),
                        "longest_gap_seconds": round(longest, 4),
                        "longest_gap_began_after_seconds": round(at - begun, 3),
                        "median_gap_seconds": round(statistics.median(gap for gap, _ in seen), 5),
                    }
                )
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return {
        "undisturbed_median_seconds": round(statistics.median(gap for gap, _ in undisturbed), 5),
        "undisturbed_longest_seconds": round(max(undisturbed)[0], 4),
        "changes": changes,
    }


def gaps(arrivals: dict[int, list[float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Returns the seconds between tokens of each stream that came between two moments, and when
    each gap began."""
    found: list[tuple[float, float]] = []
    for times in arrivals.values():
        within = [each for each in times if begin <= each <= end]
        found += [(after - before, before) for before, after in itertools.pairwise(within)]
    return found


def environment() -> dict[str, Any]:
    """Returns the card, the versions and the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"device": jax.devices()[0].device_kind, "versions": versions, "commit": commit}


if __name__ == "__main__":
    main()
