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
import tempfile
import time
from collections import Counter
from itertools import batched
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.offload_engine import Bench
from scripts.paired import ratio_of_turns
from scripts.working_tree import commit

FLAGS = (
    "--model qwen3-4b --load-format dummy --kv-offload-size 1G --decode-buckets 64,256 "
    "--prefill-buckets 512,2048 --max-model-len 4096"
)
TURN, PROMPT = 40, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=40, help="even")
    parser.add_argument("--flags", default=FLAGS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shlex.split(args.flags), Path(folder))
        lookup = bench.scheduler._verify  # pyright: ignore[reportPrivateUsage]
        assert lookup is not None, "speculation is off"
        tokens = args.turns * (TURN + 2) + 2 * args.rows
        live = {bench.add(bench.prompt(PROMPT), tokens) for _ in range(args.rows)}
        bench.until(lambda: live <= bench.firsts.keys())
        kinds, pairs = Counter[str](), list[tuple[float, float]]()
        for arms in batched(order(args.turns), 2):
            speeds: dict[bool, float] = {}
            for on in arms:
                while lookup.in_flight:  # drafts in flight must return first
                    bench.turn()
                scheduler: Any = bench.scheduler
                scheduler._verify = lookup if on else None
                speeds[on] = turn(bench, kinds)
            pairs.append((speeds[False], speeds[True]))
        import jax

        result = {
            "card": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": commit(),
            "flags": args.flags,
            "rows": args.rows,
            "steps": kinds,
            "step_ms": round(1e3 / (sum(off for off, _ in pairs) / len(pairs)), 4),
            "lookup over none": ratio_of_turns(pairs)._asdict(),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)
        assert bench.parts.close is not None
        bench.parts.close()


def turn(bench: Bench, kinds: Counter[str]) -> float:
    """Returns the steps per second of a turn, after two steps that are not counted."""
    for _ in range(2):
        bench.turn()
    began = time.perf_counter()
    for _ in range(TURN):
        if bench.in_flight is None:
            raise RuntimeError("the sequences have ended: take more rows than verify buckets have")
        plan = bench.in_flight[0]
        kinds["verify" if plan.verify else plan.kind] += 1
        bench.turn()
    return TURN / (time.perf_counter() - began)


def order(turns: int) -> list[bool]:
    """Pairs of both arms, each in random order."""
    words = random.Random(0)
    return [on for _ in range(turns // 2) for on in words.sample([False, True], 2)]


if __name__ == "__main__":
    main()
