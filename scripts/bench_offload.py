"""What the tier of --kv-offload-size brings: first tokens, decode streams beside restores, chats.

    python scripts/bench_offload.py --out offload.json -- --model qwen3-4b --load-format dummy

Flags after `--` are the server's. In one run, with one engine in this process:

- ttft: milliseconds from a request to its first token, median of `--repeats`: cold, on a hit on the
  device, of what only the host has, and of what only the disk has
- streams: output tokens per second of decoding sequences, alone and beside constant restores
- chats: `--chats` conversations in turn, of which the device holds `--held`, with the tier and with
  its loads turned off: seconds, and milliseconds to the first token

Link rates against a plain pinned copy: scripts/bench_link.py. About four minutes on an H200; on a
CPU, with the embedded model and --lengths 64,128, it shows only that it works.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup import environment

ROOT = Path(__file__).parents[1]


class Bench:
    """An engine without threads: the caller runs its turns."""

    def __init__(self, flags: Sequence[str], folder: Path):
        options = parse_args([*flags])
        environment.prepare(options.gpu_memory_utilization)
        from jaxserve.startup.build import build_parts
        from jaxserve.startup.timeline import Timeline
        from jaxserve.weights.model_source import find_model

        options = replace(options, kv_offload_path=options.kv_offload_path or folder)
        source = find_model(options)
        self.parts = build_parts(
            options, source, Metrics("bench"), lambda phase, done: None, Timeline()
        )
        self.scheduler, self.runner = self.parts.scheduler, self.parts.runner
        assert self.scheduler.host is not None, "pass --kv-offload-size"
        self.host = self.scheduler.host
        page_size = self.scheduler.occupancy(1).pages.page_size
        self.cache_tokens = min(pool.num_total for pool in self.scheduler.pools) * page_size
        self.vocab = source.sampled_vocab
        self.random, self.number, self.in_flight = random.Random(0), 0, None
        self.firsts: dict[str, float] = {}
        self.tokens = 0
        self.running: set[str] = set()

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random tokens, never the same."""
        return tuple(self.random.randrange(self.vocab) for _ in range(length))

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        from jaxserve.api import Request, SamplingParams

        self.number += 1
        name = f"r{self.number}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.scheduler.add(Request(id=name, prompt=prompt, params=params))
        self.running.add(name)
        return name

    def turn(self) -> None:
        """As `StepLoop._advance`."""
        self.scheduler.poll_host()
        plan = self.scheduler.plan()
        moves = self.host.take()
        if moves is not None:
            self.host.launched(self.runner.move_pages(moves))
        launched = None if plan is None else (plan, self.runner.launch(plan))
        if self.in_flight is not None:
            before, pending = self.in_flight
            now_there = self.scheduler.commit(before, self.runner.collect(pending))
            now = time.perf_counter()
            for event in now_there:
                self.tokens += event.token is not None
                self.firsts.setdefault(event.request_id, now)
                if event.finish is not None:
                    self.running.discard(event.request_id)
        elif launched is None:
            time.sleep(2e-4)
        self.in_flight = launched

    def until(self, done: Callable[[], bool], limit: float = 120.0) -> None:
        deadline = time.perf_counter() + limit
        while not done():
            assert time.perf_counter() < deadline, "no progress"
            self.turn()

    def first_token(self, prompt: tuple[int, ...]) -> float:
        """Milliseconds until the first token of a request alone."""
        began = time.perf_counter()
        name = self.add(prompt, 1)
        self.until(lambda: name not in self.running)
        return (self.firsts[name] - began) * 1e3

    def settle(self) -> None:
        """Let everything reach the host and the disk."""
        self.until(lambda: self.in_flight is None and not self.scheduler.is_moving_pages)

    def forget_device(self) -> None:
        """Empty the device's prefixes; the tier keeps its own."""
        for pool in self.scheduler.pools:
            pool.forget()

    def store(self, prompt: tuple[int, ...]) -> None:
        """Compute a prompt and have all its pages on the host."""
        self.first_token(prompt)
        self.settle()


def ttft(bench: Bench, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for length in lengths:
        times: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk": []}
        for _ in range(repeats):
            prompt = bench.prompt(length)
            times["cold"].append(bench.first_token(prompt))
            times["device"].append(bench.first_token(prompt))
            bench.settle()
            displace(bench, length)
            bench.forget_device()
            times["host"].append(bench.first_token(prompt))
            bench.settle()
            bench.forget_device()
            bench.host.index.clear()
            times["disk"].append(bench.first_token(prompt))
            bench.settle()
        found[str(length)] = {name: round(statistics.median(ms), 2) for name, ms in times.items()}
        found[str(length)]["cold over host"] = round(
            found[str(length)]["cold"] / found[str(length)]["host"], 2
        )
        print(length, found[str(length)], flush=True)
    return found


def displace(bench: Bench, length: int) -> None:
    """Let the tier store what lies behind: other prompts of the same length come."""
    for _ in range(2):
        bench.store(bench.prompt(length))


def streams(bench: Bench, rows: int, length: int, seconds: float) -> dict[str, float]:
    """Output tokens per second of `rows` sequences, alone and beside restores."""
    prompts = [bench.prompt(length) for _ in range(2)]
    for prompt in prompts:
        bench.store(prompt)

    def rate(restoring: bool) -> tuple[float, int]:
        room = bench.cache_tokens - length - 128
        most = max(min(bench.scheduler.max_model_len - 80, room // rows - 128), 8)
        names = {bench.add(bench.prompt(64), most) for _ in range(rows)}
        bench.until(lambda: names <= bench.firsts.keys())
        began, before, restores, loading = time.perf_counter(), bench.tokens, 0, ""
        while time.perf_counter() < began + seconds and names <= bench.running:
            if restoring and loading not in bench.running:
                bench.forget_device()
                loading = bench.add(prompts[restores % 2], 1)
                restores += 1
            bench.turn()
        found = (bench.tokens - before - restores) / (time.perf_counter() - began)
        for name in list(bench.running):
            bench.scheduler.abort(name)
            bench.running.discard(name)
        bench.settle()
        return found, restores

    alone, _ = rate(restoring=False)
    beside, restores = rate(restoring=True)
    return {
        "rows": rows,
        "alone": round(alone, 1),
        "beside restores": round(beside, 1),
        "share": round(beside / alone, 4),
        "restores per second": round(restores / seconds, 2),
    }


def chats(bench: Bench, count: int, turns: int, length: int, *, tier: bool) -> dict[str, float]:
    """Conversations in turn: each turn adds a question to all that was said before."""
    bench.scheduler.reset_prefix_cache()
    begin = bench.host.begin
    if not tier:
        bench.host.begin = lambda *_: False
    said = [bench.prompt(length) for _ in range(count)]
    firsts: list[float] = []
    began = time.perf_counter()
    for _ in range(turns):
        for chat in range(count):
            firsts.append(bench.first_token(said[chat]))
            said[chat] += bench.prompt(64)
    bench.host.begin = begin
    later = firsts[count:]
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "first token of later turns, ms": round(statistics.mean(later), 2),
    }


def main() -> None:
    own, _, flags = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--held", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(shlex.split(own))
    lengths = [int(length) for length in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shlex.split(flags), Path(folder))
        import jax

        chat = max(64, bench.cache_tokens // args.held - 256)
        chat = min(chat, bench.scheduler.max_model_len - 64 * (args.turns + 1))
        result = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
            ).stdout.strip(),
            "flags": flags,
            "ttft_ms": ttft(bench, lengths, args.repeats),
            "streams": streams(bench, args.rows, lengths[-1], args.seconds),
            "chats": {"count": args.chats, "tokens each": chat},
        }
        print("streams", result["streams"], flush=True)
        for name, tier in (("with the tier", True), ("without", False)):
            result["chats"][name] = chats(bench, args.chats, args.turns, chat, tier=tier)
            print("chats", name, result["chats"][name], flush=True)
        assert bench.parts.close is not None
        bench.parts.close()
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
