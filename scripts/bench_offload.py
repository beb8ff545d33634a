"""What the tier of --kv-offload-size brings: first tokens, decode streams beside restores, chats.

    python scripts/bench_offload.py --out offload.json -- --model qwen3-4b --load-format dummy

Flags after `--` are the server's. In one run, with one engine in this process:

- ttft: milliseconds from a request to its first token, median of `--repeats`: cold, on a hit on the
  device, of what only the host has, and of what only the disk has
- streams: output tokens per second of decoding sequences, alone and beside constant restores
- chats: `--chats` conversations in turn, of which the device holds `--held`, with the tier and with
  its loads turned off: seconds, and milliseconds to the first token

Each request's tier is what the engine counted: tokens found on the device, tokens that came back,
bytes read from disk. A figure whose requests hit another tier is not given, but what they hit.
Where the policy computes a prefix, because a load should take longer, its prediction is given, and
the load is measured all the same.

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup import environment

ROOT = Path(__file__).parents[1]


WHOLE = 0.8
"""Of a prompt's tokens, the share that a hit has at least: the last pages are computed."""


class First(NamedTuple):
    """A request's first token, and where its prompt was found."""

    ms: float
    known: int
    """Tokens of the prompt that came before."""
    cached: int
    """Tokens found anywhere."""
    restored: int
    """Of these, tokens that came back from below the device."""
    read: int
    """Bytes read from disk meanwhile."""
    loaded: int
    """Bytes loaded from the host's memory meanwhile."""
    refused: str
    """Why what lay below the device was computed."""

    @property
    def tier(self) -> str:
        if not self.cached:
            return "cold"
        if self.cached < WHOLE * self.known:
            return "partly cold"
        if not self.restored:
            return "device"
        if self.restored < WHOLE * self.cached:
            return "partly device"
        if not self.read:
            return "host"
        return "disk" if self.read >= WHOLE * self.loaded else "partly disk"


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
        self.metrics = Metrics("bench")
        self.parts = build_parts(
            options, source, self.metrics, lambda phase, done: None, Timeline()
        )
        self.scheduler, self.runner = self.parts.scheduler, self.parts.runner
        assert self.scheduler.host is not None, "pass --kv-offload-size"
        self.host = self.scheduler.host
        page_size = self.scheduler.occupancy(1).pages.page_size
        self.cache_tokens = min(pool.num_total for pool in self.scheduler.pools) * page_size
        cache = self.scheduler._kv_cache  # pyright: ignore[reportPrivateUsage]
        self.slots = cache.num_free_slots
        self.vocab = source.sampled_vocab
        self.random, self.number, self.in_flight = random.Random(0), 0, None
        self.firsts: dict[str, float] = {}
        self.found: dict[str, tuple[int, int]] = {}
        """Tokens cached and restored, by request."""
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
                if event.start is not None:
                    self.found[event.request_id] = event.cached_tokens, event.restored_tokens
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

    def first_token(self, prompt: tuple[int, ...], *, new: int = 0, forced: bool = False) -> First:
        """The first token of a request alone, whose last `new` tokens never came before. `forced`:
        load whatever is below the device."""
        before, decided, begin = self.moved(), self.host.decision, self.host.begin
        if forced:
            self.host.begin = lambda seq, cached, prefill_rate: begin(seq, cached, None)
        began = time.perf_counter()
        name = self.add(prompt, 1)
        self.until(lambda: name not in self.running)
        ms = (self.firsts[name] - began) * 1e3
        self.host.begin = begin
        after, decision, refused = self.moved(), self.host.decision, ""
        if decision is not None and decision is not decided and not decision.pays:
            refused = (
                f"predicted: {decision.seconds * 1e3:.1f} ms to load "
                f"({decision.disk_bytes / max(decision.host_bytes, 1):.0%} from disk), "
                f"{(decision.prefill_seconds or 0) * 1e3:.1f} ms to compute"
            )
        read, loaded = (now - then for now, then in zip(after, before, strict=True))
        return First(ms, len(prompt) - new, *self.found[name], read, loaded, refused)

    def moved(self) -> tuple[int, int]:
        """Bytes read from disk, and loaded to the device, since the start."""
        tier = self.metrics.figures().tier
        assert tier is not None
        return tier.read, tier.loaded

    @property
    def longest(self) -> int:
        """Tokens of a prompt that leaves half of the device to others."""
        return min(self.scheduler.max_model_len - 8, self.cache_tokens // 2)

    def displace(self) -> None:
        """Let others take every page of the device, so that the tier stores what lay there."""
        for _ in range(-(-self.cache_tokens * 5 // (self.longest * 4)) + 1):
            self.first_token(self.prompt(self.longest))
            self.settle()

    def settle(self) -> None:
        """Let everything reach the host and the disk."""
        self.until(lambda: self.in_flight is None and not self.scheduler.is_moving_pages)

    def forget_device(self) -> None:
        """Empty the device's prefixes; the tier keeps its own."""
        for pool in self.scheduler.pools:
            pool.forget()


def ttft(bench: Bench, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """All prompts are computed and displaced before the first comes back."""
    prompts = {length: [bench.prompt(length) for _ in range(repeats)] for length in lengths}
    found: dict[str, Any] = {str(length): {} for length in lengths}
    for length, those in prompts.items():
        pairs = [(bench.first_token(each), bench.first_token(each)) for each in those]
        for name, firsts in zip(("cold", "device"), zip(*pairs, strict=True), strict=True):
            found[str(length)] |= figure(name, firsts)
    bench.settle()
    bench.displace()
    for name in ("host", "disk"):
        for length, those in prompts.items():
            found[str(length)] |= figure(name, [from_below(bench, each, name) for each in those])
    for length, each in found.items():
        for name in ("host", "disk"):
            if each["cold"] and each[name]:
                each[f"cold over {name}"] = round(each["cold"] / each[name], 2)
        print(length, each, flush=True)
    return found


def from_below(bench: Bench, prompt: tuple[int, ...], name: str) -> First:
    """A prompt that the device does not have; for "disk" neither does the host's memory. What the
    policy refuses is loaded the second time."""
    refused = ""
    for forced in (False, True):
        bench.settle()
        bench.forget_device()
        if name == "disk":
            bench.host.index.clear()
        first = bench.first_token(prompt, forced=forced)
        if not first.refused:
            return first._replace(refused=refused)
        refused = first.refused
    raise AssertionError("a forced load was refused")


def figure(name: str, firsts: Sequence[First]) -> dict[str, Any]:
    """Returns the median of requests that hit what they should, else None and what they hit."""
    tiers = Counter(first.tier for first in firsts)
    found: dict[str, Any] = {name: None}
    if tiers.keys() == {name}:
        found[name] = round(statistics.median(first.ms for first in firsts), 2)
    else:
        found[f"{name}: hit instead"] = dict(tiers)
    refused = [first.refused for first in firsts if first.refused]
    if refused:
        found[f"{name}: computed unless forced"] = f"{len(refused)} of {len(firsts)}, {refused[-1]}"
    return found


def streams(bench: Bench, rows: int, length: int, seconds: float) -> dict[str, Any]:
    """Output tokens per second of `rows` sequences, alone and beside prompts in turn of which the
    device cannot hold all: each finds that others have displaced it."""
    if rows >= bench.slots:
        rows = bench.slots - 1
        print(f"streams: {rows} rows, so that one of {bench.slots} sequences is left", flush=True)
    length = min(length, bench.cache_tokens // 4)
    prompts = [bench.prompt(length) for _ in range(bench.cache_tokens // length + 2)]
    for prompt in prompts:
        bench.first_token(prompt)
        bench.settle()
    most = (bench.cache_tokens - 2 * length) // rows - 64 - 64
    most = max(min(bench.scheduler.max_model_len - 80, most), 8)

    def rate(restoring: bool) -> tuple[float, list[str], int]:
        live, others = {bench.add(bench.prompt(64), most) for _ in range(rows)}, list[str]()
        bench.until(lambda: live <= bench.firsts.keys())
        began, before, (_, loaded) = time.perf_counter(), bench.tokens, bench.moved()
        while time.perf_counter() < began + seconds:
            if restoring and (not others or others[-1] not in bench.running):
                others.append(bench.add(prompts[len(others) % len(prompts)], 1))
            for name in live - bench.running:  # as many as at the start
                live.remove(name)
                live.add(bench.add(bench.prompt(64), most))
            bench.turn()
        took, moved = time.perf_counter() - began, bench.moved()[1] - loaded
        over = [name for name in others if name not in bench.running]
        found = (bench.tokens - before - len(over)) / took
        for name in list(bench.running):
            bench.scheduler.abort(name)
            bench.running.discard(name)
        bench.settle()
        return found, over, moved

    (alone, _, _), (beside, over, moved) = rate(restoring=False), rate(restoring=True)
    restores = sum(bench.found[name][1] >= WHOLE * length for name in over)
    result: dict[str, Any] = {
        "rows": rows,
        "prompts in turn": f"{len(prompts)} of {length} tokens",
        "alone": round(alone, 1),
        "beside restores": None,
        "restores per second": round(restores / seconds, 2),
        "GB per second to the device": round(moved / seconds / 1e9, 2),
    }
    if restores and restores >= WHOLE * len(over):
        result |= {"beside restores": round(beside, 1), "share": round(beside / alone, 4)}
    else:
        result["hit instead"] = f"{restores} of {len(over)} requests beside came back from below"
        if bench.host.decision is not None:
            result["last decision"] = bench.host.decision._asdict()
    return result


def chats(bench: Bench, count: int, turns: int, length: int, *, tier: bool) -> dict[str, Any]:
    """Conversations in turn: each turn adds a question to all that was said before."""
    bench.scheduler.reset_prefix_cache()
    begin = bench.host.begin
    if not tier:
        bench.host.begin = lambda seq, cached, prefill_rate: False
    said = [bench.prompt(length) for _ in range(count)]
    firsts: list[First] = []
    began = time.perf_counter()
    for _ in range(turns):
        for chat in range(count):
            firsts.append(bench.first_token(said[chat], new=64))
            said[chat] += bench.prompt(64)
    bench.host.begin = begin
    later, seconds = firsts[count:], time.perf_counter() - began
    came_back = sum(first.restored > 0 for first in later)
    mean = round(statistics.mean(first.ms for first in later), 2)
    as_said = came_back > len(later) // 2 if tier else not came_back
    return {
        "seconds": round(seconds, 2) if as_said else None,
        "first token of later turns, ms": mean if as_said else None,
        "later turns hit": dict(Counter(first.tier for first in later)),
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
