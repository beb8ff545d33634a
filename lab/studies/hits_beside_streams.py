"""Shows where a prefix cache hit beside decoding streams spends its time: device and host.

    python -m lab.studies.hits_beside_streams --out hits.json

One engine of Qwen3-4B's shape with random weights decodes 15 sequences. Requests whose prefix is on
the device are added one after another, `--every` seconds apart. A profiler records some of them.
The result has, for the steps around each request: how long the device was idle before the step, how
long the step's kernels ran, and how long the engine's thread took until the launch; and for each
kind of step the time of its kernels by name. It takes two minutes on a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from kernel_profile import runs_of
from working_tree import commit

from scripts.offload_engine import Bench

FLAGS = (
    "--model qwen3-4b --load-format dummy --kv-offload-size 1G --kv-cache-memory-bytes 9G "
    "--max-model-len 20480 --decode-buckets 1,4,16 --prefill-buckets 64,128,256,2048 "
    "--speculative-config off"
)
ROWS = 15
GAP = 20.0
"""Microseconds without a kernel that count as an idle device."""


class Turn(NamedTuple):
    """One turn of the engine. Times in milliseconds."""

    kind: str
    tokens: int
    planned: float
    launched: float
    collected: float
    """From the previous turn's results to this turn's results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=15232)
    parser.add_argument("--every", type=float, default=0.07)
    parser.add_argument("--hits", type=int, default=10)
    parser.add_argument("--flags", default=FLAGS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shlex.split(args.flags), Path(folder))
        import jax

        prompt = bench.prompt(args.length)
        bench.first_token(prompt)
        bench.settle()
        live = {bench.add(bench.prompt(64), 3000) for _ in range(ROWS)}
        bench.until(lambda: live <= bench.firsts.keys())
        run(bench, prompt, args.every, args.hits)
        turns = run(bench, prompt, args.every, 40)
        with tempfile.TemporaryDirectory() as traces:
            with jax.profiler.trace(traces, create_perfetto_trace=True):
                traced = run(bench, prompt, args.every, args.hits)
            trace = next(Path(traces).rglob("perfetto_trace.json.gz"))
            events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        result = {
            "card": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": commit(),
            "flags": args.flags,
            "turns": by_distance(turns),
            "traced turns": by_distance(traced),
            "device": steps_of(events) if jax.default_backend() == "gpu" else {},
            "around": around(events) if jax.default_backend() == "gpu" else [],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result["turns"]), json.dumps(result["device"]), sep="\n", flush=True)
        assert bench.parts.close is not None
        bench.parts.close()


def run(bench: Bench, prompt: tuple[int, ...], every: float, hits: int) -> list[Turn]:
    """Runs turns until `hits` requests have ended."""
    turns, added, name = list[Turn](), 0, ""
    began = last = time.perf_counter()
    while added < hits or name in bench.running:
        if time.perf_counter() >= began + every * (added + 1) and added < hits:
            name, added = bench.add(prompt, 1), added + 1
        before, work = bench.in_flight, bench.work
        bench.turn()
        now, spent = time.perf_counter(), bench.work.since(work)
        kind = "none" if before is None else before[0].kind
        tokens = 0 if before is None else before[0].num_tokens
        took = ((now - last) * 1e3, spent.planning * 1e3, spent.before_step * 1e3)
        turns.append(Turn(kind, tokens, took[1], took[2], took[0]))
        last = now
    return turns


def by_distance(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Median milliseconds of turns by their distance from the turn that collects a mixed step."""
    mixed = [number for number, turn in enumerate(turns) if turn.kind == "mixed"]
    found: dict[str, dict[str, float]] = {}
    for distance in range(-4, 8):
        near = [turns[at + distance] for at in mixed if 0 <= at + distance < len(turns)]
        if near:
            found[f"{distance:+d}"] = {
                "collected": round(median(turn.collected for turn in near), 3),
                "mean": round(sum(turn.collected for turn in near) / len(near), 3),
                "planned": round(median(turn.planned for turn in near), 3),
                "launched": round(median(turn.launched for turn in near), 3),
                "tokens": median(turn.tokens for turn in near),
            }
    return found


def steps_of(events: Sequence[Any]) -> dict[str, Any]:
    """Cuts the kernels at idle times, and adds their times by name for short and long steps."""
    cards = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]
    }
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("pid") in cards and "correlation_id" in event.get("args", {})
    )
    gaps: list[tuple[float, float]] = []
    end = spans[0][0]
    for begin, stop in spans:
        if begin - end > GAP:
            gaps.append((round(end - spans[0][0], 1), round(begin - end, 1)))
        end = max(end, stop)
    names: dict[str, list[float]] = defaultdict(list)
    for each in runs_of(events):
        names[each.name].append(each.adds_us)
    kernels = {
        name: {
            "count": len(us),
            "sum_ms": round(sum(us) / 1e3, 3),
            "median_us": round(median(us), 2),
        }
        for name, us in sorted(names.items(), key=lambda item: -sum(item[1]))[:60]
    }
    return {
        "seconds": round((end - spans[0][0]) / 1e6, 4),
        "idle_ms": round(sum(us for _, us in gaps) / 1e3, 3),
        "idle": gaps[:400],
        "kernels": kernels,
    }


def around(events: Sequence[Any], hits: int = 3) -> list[list[Any]]:
    """The events of all threads and of the device around the first mixed steps: process, thread,
    begin and duration in microseconds, name."""
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("name") in ("process_name", "thread_name")
    }
    first = sorted(event["ts"] for event in events if "_program" in event.get("name", ""))
    begins = [at for before, at in zip([-1e9, *first], first, strict=False) if at - before > 2e4]
    found: list[list[Any]] = []
    for begin in begins[1 : 1 + hits]:
        rows = [
            [
                names.get((event["pid"], event.get("tid")), event.get("tid")),
                round(event["ts"] - begin, 1),
                round(event["dur"], 1),
                event["name"],
            ]
            for event in events
            if "dur" in event
            and begin - 9000 < event["ts"] < begin + 300
            and (event["dur"] > 8 or event["ts"] > begin - 6000)
        ]
        found.append(sorted(rows, key=lambda row: row[1]))
    return found


if __name__ == "__main__":
    main()
