"""Measures what the lookup of drafts costs decode steps of many rows, where nothing is drafted.

    python -m lab.studies.lookup_beside_streams --out lookup.json
    python -m lab.studies.lookup_beside_streams --rows 192 --out lookup.json

One engine in this process decodes `--rows` sequences of random weights, without HTTP and without
prompts that come and go. Its scheduler looks up drafts in some turns of 40 steps and not in the
others, in random order. The result is the ratio of the steps per second: with lookup over without
(`scripts/paired.py`). With more rows than the largest verify bucket has, both plan the same steps.
It takes a minute on a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from itertools import batched
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from jaxserve.api import Request, SamplingParams
from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup import environment
from scripts.paired import ratio_of_turns
from scripts.working_tree import commit

FLAGS = (
    "--model qwen3-4b --load-format dummy --decode-buckets 64,256 --prefill-buckets 512,2048 "
    "--max-model-len 4096"
)
TURN, PROMPT = 40, 128


class Loop:
    """An engine without threads, one step ahead of its results."""

    def __init__(self, flags: str):
        options = parse_args(shlex.split(flags))
        environment.prepare(options.gpu_memory_utilization)
        from jaxserve.engine.engine import SWITCH_INTERVAL
        from jaxserve.startup.build import build_parts
        from jaxserve.startup.timeline import Timeline
        from jaxserve.weights.model_source import find_model

        sys.setswitchinterval(SWITCH_INTERVAL)
        source = find_model(options)
        metrics = Metrics("study")
        parts = build_parts(options, source, metrics, lambda phase, done: None, Timeline())
        self.scheduler, self.runner, self.vocab = (
            parts.scheduler,
            parts.runner,
            source.sampled_vocab,
        )
        self.lookup = self.scheduler._verify  # pyright: ignore[reportPrivateUsage]
        assert self.lookup is not None, "speculation is off"
        self.in_flight: Any = None
        self.kinds: dict[str, int] = {}

    def step(self) -> None:
        """Launches a step and reads the results of the previous one."""
        plan = self.scheduler.plan()
        launched = None if plan is None else (plan, self.runner.launch(plan))
        if self.in_flight is not None:
            before, pending = self.in_flight
            self.scheduler.commit(before, self.runner.collect(pending))
            kind = "verify" if before.verify else before.kind
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.in_flight = launched

    def fill(self, rows: int) -> None:
        """Runs steps until all `rows` sequences decode. Raises RuntimeError if they do not fit."""
        for _ in range(4 * rows):
            self.step()
            if self.in_flight and len(self.in_flight[0].rows) == rows:
                return
        raise RuntimeError(f"{rows} sequences of this length do not fit the KV cache")

    def turn(self, on: bool) -> float:
        """Returns the steps per second of a turn, after two steps that are not counted."""
        self.scheduler._verify = self.lookup if on else None  # pyright: ignore[reportPrivateUsage]
        for _ in range(2):
            self.step()
        began = time.perf_counter()
        for _ in range(TURN):
            self.step()
        return TURN / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=40, help="even")
    parser.add_argument("--flags", default=FLAGS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loop, words = Loop(args.flags), random.Random(0)
    tokens = args.turns * (TURN + 2) + args.rows
    for number in range(args.rows):
        prompt = tuple(words.randrange(loop.vocab) for _ in range(PROMPT))
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        loop.scheduler.add(Request(id=f"r{number}", prompt=prompt, params=params))
    loop.fill(args.rows)
    loop.kinds.clear()
    pairs: list[tuple[float, float]] = []
    for arms in batched(order(args.turns, words), 2):
        speeds = {on: loop.turn(on) for on in arms}
        pairs.append((speeds[False], speeds[True]))
    import jax

    result = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "flags": args.flags,
        "rows": args.rows,
        "steps": loop.kinds,
        "step_ms": round(1e3 / (sum(off for off, _ in pairs) / len(pairs)), 4),
        "lookup over none": ratio_of_turns(pairs)._asdict(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


def order(turns: int, words: random.Random) -> list[bool]:
    """Pairs of both arms, each in random order."""
    return [on for _ in range(turns // 2) for on in words.sample([False, True], 2)]


if __name__ == "__main__":
    main()
