"""Measures KV offload (--kv-offload-size): time to first token, decode rate beside restores, chats.

    python scripts/bench_offload.py --out offload.json -- --model qwen3-4b --load-format dummy FLAGS

Flags after `--` are the server's, e.g. --kv-offload-size 56G --kv-cache-memory-bytes 9G
--decode-buckets 1,4,16; `offload` in scripts/proofs.py has them all. One engine in this process
runs all parts:

- ttft: milliseconds from a request to its first token, median of `--repeats`: cold, and with the
  prefix on the device, only in host memory, and only on disk
- streams: output tokens per second of decoding sequences: alone, beside constant restores, beside
  as many requests that hit the device, and beside `--restores-per-second`. The result is the rate
  of restores at which the sequences keep 97 % of their speed. With `--load-rate 10G,20G` also
  beside constant restores that --kv-offload-load-rate bounds
- chats: `--chats` conversations in turn, of which the device holds `--held`, with offload and with
  its loads turned off: seconds, and milliseconds to the first token

The engine's counters tell which tier a request hit: tokens found on the device, tokens restored,
bytes read from disk. If requests hit another tier than intended, the result has the tiers instead
of the figure. If the policy recomputes a prefix because a load would take longer, the result has
its prediction, and the load is measured all the same.

scripts/bench_link.py measures the rates of the link. This script takes about four minutes on an
H200. On a CPU, with the embedded model and --lengths 128,256, it only shows that it works. Each
part is written when it is done; --parts selects parts. The pages of all prompts must fit
--kv-offload-disk-size, or the disk's figures are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxserve.cli.flag_values import size_in_bytes
from scripts.offload_engine import WHOLE, Bench, First, Work


def ttft(bench: Bench, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Times to first token. All prompts are computed and displaced before the first is restored."""
    prompts = {length: [bench.prompt(length) for _ in range(repeats)] for length in lengths}
    found: dict[str, Any] = {str(length): {} for length in lengths}
    for length, those in prompts.items():
        pairs = [(bench.first_token(each), bench.first_token(each)) for each in those]
        for name, firsts in zip(("cold", "device"), zip(*pairs, strict=True), strict=True):
            found[str(length)] |= figure(name, firsts)
        print(length, found[str(length)], flush=True)
    bench.displace()
    for name in ("host", "disk"):
        for length, those in prompts.items():
            found[str(length)] |= figure(name, [from_below(bench, each, name) for each in those])
            print(length, name, found[str(length)], flush=True)
    for each in found.values():
        for name in ("host", "disk"):
            if each["cold"] and each[name]:
                each[f"cold over {name}"] = round(each["cold"] / each[name], 2)
    return found


def from_below(bench: Bench, prompt: tuple[int, ...], name: str) -> First:
    """Runs a prompt that is not on the device, and for "disk" not in host memory either. If the
    policy refuses to load it, a second run forces the load."""
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
    """Returns the median time if all requests hit the intended tier; else None and the tiers
    hit."""
    tiers = Counter(first.tier for first in firsts)
    found: dict[str, Any] = {name: None}
    if tiers.keys() == {name}:
        found[name] = round(statistics.median(first.ms for first in firsts), 2)
        loads = [first.load_ms for first in firsts if first.load_ms is not None]
        if loads:
            found[f"{name}: of these, the load"] = round(statistics.median(loads), 2)
    else:
        found[f"{name}: hit instead"] = dict(tiers)
    refused = [first.refused for first in firsts if first.refused]
    if refused:
        found[f"{name}: computed unless forced"] = f"{len(refused)} of {len(firsts)}, {refused[-1]}"
    return found


class Rate(NamedTuple):
    """The rate of decoding sequences, and the requests that ran beside them."""

    tokens: float
    """Output tokens of the sequences per second."""
    ended: list[str]
    """The requests that ended."""
    loaded: int
    """Bytes loaded to the device."""
    work: Work
    seconds: float

    def beside(self, alone: float) -> dict[str, Any]:
        """Returns the cost of the requests. `alone`: tokens per second without them."""
        share, turns = self.tokens / alone, max(self.work.turns, 1)
        count = max(len(self.ended), 1)
        return {
            "tokens per second": round(self.tokens, 1),
            "share": round(share, 4),
            "requests per second": round(len(self.ended) / self.seconds, 2),
            "GB per second to the device": round(self.loaded / self.seconds / 1e9, 2),
            "ms lost per request": round((1 - share) * self.seconds / count * 1e3, 2),
            "engine, ms per turn": round(self.work.seconds / turns * 1e3, 3),
            "of these to plan": round(self.work.planning / turns * 1e3, 3),
            "before the step, ms per turn": round(self.work.before_step / turns * 1e3, 3),
            "late steps per request": round(self.work.late / count, 2),
            "turns per request": round(turns / count, 1),
            "turns with moves per request": round(self.work.launches / count, 1),
            "pages restored per request": round(self.work.restored / count, 1),
            "pages stored per request": round(self.work.stored / count, 1),
        }


class Streams:
    """A constant number of decoding sequences, and requests beside them."""

    def __init__(self, bench: Bench, rows: int, most: int, seconds: float):
        self.bench, self.rows, self.most, self.seconds = bench, rows, most, seconds

    def rate(self, prompts: Iterator[tuple[int, ...]] | None = None, every: float = 0.0) -> Rate:
        """Returns the rate beside requests for `prompts`, which run one after another, at most one
        every `every` seconds."""
        bench, begun = self.bench, list[str]()
        live = {bench.add(bench.prompt(64), self.most) for _ in range(self.rows)}
        bench.until(lambda: live <= bench.firsts.keys())
        began, before, (_, loaded) = time.perf_counter(), bench.tokens, bench.moved()
        work = bench.work
        while (now := time.perf_counter()) < began + self.seconds:
            due = now >= began + len(begun) * every
            if prompts and due and (not begun or begun[-1] not in bench.running):
                begun.append(bench.add(next(prompts), 1))
            for name in live - bench.running:  # as many as at the start
                live.remove(name)
                live.add(bench.add(bench.prompt(64), self.most))
            bench.turn()
        took, moved = time.perf_counter() - began, bench.moved()[1] - loaded
        ended = [name for name in begun if name not in bench.running]
        tokens, work = (bench.tokens - before - len(ended)) / took, bench.work.since(work)
        for name in list(bench.running):
            bench.scheduler.abort(name)
            bench.running.discard(name)
        bench.settle()
        print(f"streams beside {len(ended) / took:.2f} requests: {tokens:.1f} tokens", flush=True)
        return Rate(tokens, ended, moved, work, took)


def streams(
    bench: Bench,
    rows: int,
    length: int,
    seconds: float,
    rates: Sequence[float],
    load_rates: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Output tokens per second of `rows` sequences. Yields the figures so far after each run.

    They run alone; beside requests whose prefixes must be restored; and beside as many requests
    that hit the device. The prompts of restores are more than the device can hold, and take turns,
    so that each has been displaced. Requests run one after another: without a bound, with each of
    `load_rates`, and then at the given rates.
    The tier costs the difference between restores and hits, since both compute their last page.
    """
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
    run = Streams(bench, rows, most, seconds)
    alone = run.rate()
    result: dict[str, Any] = {
        "rows": rows,
        "prompts in turn": f"{len(prompts)} of {length} tokens",
        "alone": round(alone.tokens, 1),
        "engine alone, ms per turn": round(alone.work.seconds / alone.work.turns * 1e3, 3),
        "late steps alone, per turn": round(alone.work.late / alone.work.turns, 4),
    }
    in_turn = itertools.cycle(prompts)
    restoring = run.rate(in_turn)
    result["beside restores"] = beside_restores(bench, restoring, length, alone.tokens)
    yield result
    for name, load_rate in load_rates.items():
        with bench.bounded(load_rate):
            rate = run.rate(in_turn)
        figures = beside_restores(bench, rate, length, alone.tokens)
        result[f"beside restores with --kv-offload-load-rate {name}"] = figures
        yield result
    paced = result["beside so many restores per second"] = dict[str, Any]()
    for each in rates:
        rate = run.rate(in_turn, every=1 / each)
        paced[f"{each:g}"] = beside_restores(bench, rate, length, alone.tokens)
        yield result
    points = [each for each in (*paced.values(), result["beside restores"]) if "share" in each]
    result["restores per second, GB per second at 97 %"] = fastest(points)
    bench.first_token(prompts[0])
    every = restoring.seconds / max(len(restoring.ended), 1)
    hitting = run.rate(itertools.repeat(prompts[0]), every)
    hit = [bench.found[name] for name in hitting.ended]
    whole = sum(cached >= WHOLE * length and not restored for cached, restored in hit)
    if whole and whole >= WHOLE * len(hit):
        result["beside device hits"] = hitting.beside(alone.tokens)
        result["share beside device hits"] = round(restoring.tokens / hitting.tokens, 4)
    else:
        result["device hits: hit instead"] = f"{whole} of {len(hit)} requests hit the device"
    yield result


def beside_restores(bench: Bench, rate: Rate, length: int, alone: float) -> dict[str, Any]:
    """Returns the figures if the requests were restored from lower tiers, else the tiers that they
    hit."""
    came = [bench.found[name] for name in rate.ended]
    whole = sum(restored >= WHOLE * length for _, restored in came)
    if whole and whole >= WHOLE * len(came):
        return rate.beside(alone)
    found: dict[str, Any] = {"hit instead": f"{whole} of {len(came)} requests came from below"}
    if bench.host.decision is not None:
        found["last decision"] = bench.host.decision._asdict()
    return found


def fastest(points: Sequence[dict[str, Any]], share: float = 0.97) -> tuple[float, float] | None:
    """Returns the restores and GB per second at which sequences keep `share` of their rate, by
    linear interpolation between the points; None if they keep more at every point. Without restores
    they keep 1."""
    before = (0.0, 0.0, 1.0)
    for point in sorted(points, key=lambda each: each["requests per second"]):
        names = ("requests per second", "GB per second to the device", "share")
        restores, gigabytes, kept = (point[name] for name in names)
        if kept < share:
            part = (before[2] - share) / (before[2] - kept)
            now = (restores, gigabytes)
            first, second = (a + part * (b - a) for a, b in zip(before[:2], now, strict=True))
            return round(first, 2), round(second, 2)
        before = (restores, gigabytes, kept)
    return None


def chats(bench: Bench, count: int, turns: int, length: int, *, tier: bool) -> dict[str, Any]:
    """Runs conversations in turn. Each turn adds a question to the whole conversation so far."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--restores-per-second", default="1,2,4,8")
    parser.add_argument("--load-rate", default="", help="bytes per second, such as 10G,20G")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--held", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parts", default="ttft,streams,chats")
    args = parser.parse_args(shlex.split(own))
    lengths = [int(length) for length in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shlex.split(flags), Path(folder))
        import jax

        commit = ["git", "rev-parse", "--short", "HEAD"]
        result: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": subprocess.run(
                commit, cwd=ROOT, capture_output=True, text=True
            ).stdout.strip(),
            "flags": flags,
        }
        for name, found in measured(bench, args, lengths):
            result[name] = found
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for name in args.parts.split(","):
            print(name, json.dumps(result["ttft_ms" if name == "ttft" else name]), flush=True)
        assert bench.parts.close is not None
        bench.parts.close()


def measured(
    bench: Bench, args: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the figures of each part when it is over."""
    parts = args.parts.split(",")
    if "ttft" in parts:
        yield "ttft_ms", ttft(bench, lengths, args.repeats)
    if "streams" in parts:
        rates = [float(rate) for rate in args.restores_per_second.split(",") if rate]
        bounds = {each: size_in_bytes(each) for each in args.load_rate.split(",") if each}
        for figures in streams(bench, args.rows, lengths[-1], args.seconds, rates, bounds):
            yield "streams", figures
    if "chats" in parts:
        tokens = max(64, bench.cache_tokens // args.held - 256)
        tokens = min(tokens, bench.scheduler.max_model_len - 64 * (args.turns + 1))
        found: dict[str, Any] = {"count": args.chats, "tokens each": tokens}
        for name, tier in (("with the tier", True), ("without", False)):
            found[name] = chats(bench, args.chats, args.turns, tokens, tier=tier)
            yield "chats", found


if __name__ == "__main__":
    main()
