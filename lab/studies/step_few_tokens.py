"""Compares ways to launch the experts of few tokens in whole steps, in turns in one process.

    python -m lab.studies.step_few_tokens --model qwen3-30b-a3b --quantization int4 --layers 16

The ways are those of `bench_few_tokens`. Models, formats and timings are those of
`scripts/bench_step.py`. The ways share weights. Each has its own programs and KV cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_step

from jaxserve.metrics.metrics import Metrics
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.runner.runner import Runner
from lab.studies.bench_few_tokens import KEY, LIMITS

CONTEXT = 1024


def main() -> None:
    args = parse_args()
    _, config, params = bench_step.make_runner(NAMED_MODELS[args.model], args)
    runners = {}
    for way in args.ways:
        start = time.perf_counter()
        target = config.target.with_tuned({KEY: LIMITS[way]})
        own = dataclasses.replace(config, target=target)
        runners[way] = Runner(own, params, Metrics(way)), own
        runners[way][0].compile(os.cpu_count() or 1, lambda name, done: None)
        print(f"{way}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    found: dict[str, dict[int, list[Any]]] = {}
    for _ in range(args.rounds):
        for way, (runner, own) in runners.items():
            for batch in args.batch:
                each = bench_step.time_decode(runner, own, params, batch, CONTEXT, 1.0, args)
                found.setdefault(way, {}).setdefault(batch, []).append(each)
    rows = [
        {"way": way, "batch": batch, **middle(times)}
        for batch in args.batch
        for way, of_way in found.items()
        for times in [of_way[batch]]
    ]
    for row in rows:
        print(args.model, args.quantization, args.layers, row, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"args": vars(args), "rows": rows}, default=str, indent=1))


def middle(times: list[Any]) -> dict[str, Any]:
    """Returns the median over the rounds: step times in ms, and the kernels of the step."""
    steps = sorted(round(each.step_ms, 4) for each in times)
    return {"ms": steps[(len(steps) - 1) // 2], "rounds_ms": steps, "kernels": times[0].kernels}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--quantization")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--batch", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 8]
    )
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=5, help="of all ways, in turns")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--kv-gib", type=float, default=3.0, help="of each way")
    parser.add_argument("--temperature", type=float, default=1.0, help="above 0 rows differ")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(
        kv_cache_dtype="auto", page_size=64, separate_layers=False, lm_head_dtype=None,
        fp8_copy=False,
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
