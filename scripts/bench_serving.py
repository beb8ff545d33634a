"""Puts a closed-loop load on any OpenAI-compatible server: tokens per second, TTFT, TPOT.

    python scripts/bench_serving.py --url http://127.0.0.1:8000 --concurrency 1,8,64 \
        --prompt-tokens 1024 --output-tokens 128
    python scripts/bench_serving.py --prefix-hit 256,1024,4096,16384

Each client sends its next request when the previous one has ended. Prompts are random token ids,
new for every request, so a prefix cache never helps. With `--same-prompts` each point begins with
the prompts of the previous point (half of its own if clients double), like benchmarks that use the
same seed for every point. Use it only to compare with figures measured that way. Failures are
counted and shown, never dropped.

For jaxserve the script also shows the share of steps that were launched late, when the device was
already idle. A high share means that the host is too slow for its streams.

With `--prefix-hit` one client measures the time to the first token for prompts of these lengths:
new ones, and one that the server has answered before. `--stall` starts this many decoding streams,
sends one long prompt, and reports the longest time that any stream waited for a token meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import re
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

STREAM_TOKENS = 2_048
"""Output tokens of each stream of `--stall`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The parameters of all requests of one point."""

    url: str
    model: str
    prompt_tokens: int
    output_tokens: int
    max_token_id: int
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request, in seconds. TPOT is the mean time per token after the first."""

    ttft: float
    tpot: float
    tokens: int
    error: str | None = None
    cached: int = 0
    times: tuple[float, ...] = ()
    """Arrival time of each token."""


async def main() -> None:
    args = parse_args()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        load = Load(
            url=args.url.rstrip("/"),
            model=args.model or await served_model(session, args.url),
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            max_token_id=args.max_token_id,
            temperature=args.temperature,
        )
        if args.prefix_hit:
            show_hits(await prefix_hits(session, load, args), args.out)
            return
        if args.stall:
            show_stall(await stall(session, load, args), args.out)
            return
        points = []
        for concurrency in args.concurrency:
            total = max(args.min_requests, args.rounds * concurrency)
            seed = args.seed if args.same_prompts else f"{args.seed}/{concurrency}"
            rng = random.Random(seed)
            points.append(await run_point(session, load, concurrency, total, rng))
    result = {"load": dataclasses.asdict(load), "points": points}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--concurrency", type=sizes, default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-token-id", type=int, default=150_000)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3, help="requests per client")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--same-prompts", action="store_true", help="see above")
    parser.add_argument(
        "--prefix-hit", type=sizes, metavar="LENGTHS", help="measure TTFT, cold and on a prefix hit"
    )
    parser.add_argument("--stall", type=int, metavar="STREAMS", help="see above")
    parser.add_argument(
        "--stall-prompt", type=int, default=16_384, help="tokens of the long prompt"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url.rstrip('/')}/v1/models") as reply:
        return (await reply.json())["data"][0]["id"]


async def run_point(
    session: aiohttp.ClientSession,
    load: Load,
    concurrency: int,
    total: int,
    rng: random.Random,
) -> dict[str, Any]:
    """`total` requests over `concurrency` clients; times in the result are milliseconds."""
    prompts = [
        [rng.randrange(load.max_token_id) for _ in range(load.prompt_tokens)] for _ in range(total)
    ]
    outcomes: list[Outcome] = []

    async def client() -> None:
        while prompts:
            outcomes.append(await request(session, load, prompts.pop(0)))

    before = await steps(session, load)
    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed = time.perf_counter() - start
    after = await steps(session, load)
    good = [outcome for outcome in outcomes if outcome.error is None]
    return {
        "concurrency": concurrency,
        "requests": total,
        "failed": total - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:3],
        "output_tok_per_s": sum(outcome.tokens for outcome in good) / elapsed,
        "ttft_ms": summary([outcome.ttft for outcome in good]),
        "tpot_ms": summary([outcome.tpot for outcome in good]),
        "cached_share": sum(each.cached for each in good) / max(len(good) * load.prompt_tokens, 1),
        "steps": after.all - before.all,
        "late_steps": after.late - before.late,
    }


class Steps(NamedTuple):
    """Steps of a server since its start. `late`: those launched when the device was already
    idle."""

    all: int
    late: int


async def steps(session: aiohttp.ClientSession, load: Load) -> Steps:
    """Steps according to jaxserve's metrics. Other servers have no such metrics."""
    async with session.get(f"{load.url}/metrics") as reply:
        text = await reply.text() if reply.status == 200 else ""

    def total(name: str) -> int:
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, values)))

    return Steps(total("jaxserve_step_seconds_count"), total("jaxserve_late_steps_total"))


async def request(session: aiohttp.ClientSession, load: Load, prompt: list[int]) -> Outcome:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    times: list[float] = []
    tokens = cached = 0
    try:
        async with session.post(f"{load.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                text = (await reply.text())[:200]
                return Outcome(ttft=0, tpot=0, tokens=0, error=f"{reply.status} {text}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return Outcome(ttft=0, tpot=0, tokens=0, error=str(chunk["error"]))
                if chunk["choices"]:
                    times.append(time.perf_counter())
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                    details = chunk["usage"].get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or 0
    except (aiohttp.ClientError, TimeoutError) as error:
        return Outcome(ttft=0, tpot=0, tokens=0, error=type(error).__name__)
    if not times:
        return Outcome(ttft=0, tpot=0, tokens=0, error="an answer without a token")
    return Outcome(
        ttft=times[0] - start,
        tpot=(times[-1] - times[0]) / max(tokens - 1, 1),
        tokens=tokens,
        cached=cached,
        times=tuple(times),
    )


async def prefix_hits(
    session: aiohttp.ClientSession, load: Load, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Per length: TTFT of 5 new prompts, and of 15 repetitions of one, after 3 more of each."""
    load = dataclasses.replace(load, output_tokens=2)
    rng = random.Random(f"{args.seed}/prefix")
    points = []
    for length in args.prefix_hit:
        prompts = [[rng.randrange(load.max_token_id) for _ in range(length)] for _ in range(8)]
        cold = [await request(session, load, prompt) for prompt in prompts][3:]
        hits = [await request(session, load, prompts[-1]) for _ in range(18)][3:]
        points.append(
            {
                "prompt_tokens": length,
                "errors": sorted({o.error for o in (*cold, *hits) if o.error})[:3],
                "cached_tokens": max(outcome.cached for outcome in hits),
                "cold_ttft_ms": summary([o.ttft for o in cold if not o.error]),
                "hit_ttft_ms": summary([o.ttft for o in hits if not o.error]),
            }
        )
    return points


def show_hits(points: list[dict[str, Any]], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(points, indent=1) + "\n")
    table = Table(title="time to the first token, ms")
    for column in ("prompt", "cold p50", "p90", "hit p50", "p90", "cached"):
        table.add_column(column, justify="right")
    for point in points:
        cold, hit = point["cold_ttft_ms"], point["hit_ttft_ms"]
        values = (cold["p50"], cold["p90"], hit["p50"], hit["p90"])
        shown = [f"{value:.2f}" for value in values]
        table.add_row(str(point["prompt_tokens"]), *shown, str(point["cached_tokens"]))
        for error in point["errors"]:
            print(f"  {point['prompt_tokens']} tokens: {error}")
    Console(width=100).print(table)


async def stall(
    session: aiohttp.ClientSession, load: Load, args: argparse.Namespace
) -> dict[str, Any]:
    """The longest time between tokens of any stream, before and while a long prompt arrives."""
    rng = random.Random(f"{args.seed}/stall")

    def prompt(length: int) -> list[int]:
        return [rng.randrange(load.max_token_id) for _ in range(length)]

    # Streams must decode until the long prompt has been read.
    endless = dataclasses.replace(load, output_tokens=max(load.output_tokens, STREAM_TOKENS))
    streams = [
        asyncio.create_task(request(session, endless, prompt(64))) for _ in range(args.stall)
    ]
    await asyncio.sleep(2.0)
    sent = time.perf_counter()
    single = dataclasses.replace(load, output_tokens=2)
    long = await request(session, single, prompt(args.stall_prompt))
    arrived = sent + long.ttft
    outcomes = await asyncio.gather(*streams)

    def gaps(begin: float, end: float) -> list[float]:
        return [
            later - earlier
            for outcome in outcomes
            for earlier, later in itertools.pairwise(outcome.times)
            if begin <= later and earlier <= end
        ]

    before, during = gaps(sent - 0.5, sent), gaps(sent, arrived)
    if not during:
        raise SystemExit("nothing measured: no stream was decoding when the long prompt arrived")
    return {
        "streams": args.stall,
        "prompt_tokens": args.stall_prompt,
        "errors": sorted({o.error for o in (*outcomes, long) if o.error})[:3],
        "ttft_ms": long.ttft * 1e3,
        "itl_before_ms": summary(before) | {"max": max(before, default=0.0) * 1e3},
        "itl_during_ms": summary(during) | {"max": max(during, default=0.0) * 1e3},
    }


def show_stall(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, p90 and p99 in milliseconds."""
    if not seconds:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3

    return {"p50": median(ordered) * 1e3, "p90": at(0.9), "p99": at(0.99)}


def show(result: dict[str, Any]) -> None:
    load = result["load"]
    table = Table(
        title=f"{load['model']}: {load['prompt_tokens']} tokens in, {load['output_tokens']} out"
    )
    columns = (
        "clients",
        "requests",
        "failed",
        "tok/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99 (ms)",
        "late",
        "cached",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for point in result["points"]:
        table.add_row(
            str(point["concurrency"]),
            str(point["requests"]),
            str(point["failed"]),
            f"{point['output_tok_per_s']:.0f}",
            f"{point['ttft_ms']['p50']:.1f}",
            f"{point['ttft_ms']['p99']:.1f}",
            f"{point['tpot_ms']['p50']:.2f}",
            f"{point['tpot_ms']['p99']:.2f}",
            f"{point['late_steps'] / point['steps']:.1%}" if point["steps"] else "",
            f"{point['cached_share']:.0%}",
        )
    Console(width=100).print(table)
    for point in result["points"]:
        for error in point["errors"]:
            print(f"  {point['concurrency']} clients: {error}")


if __name__ == "__main__":
    asyncio.run(main())
