"""A closed loop on simulated time, for comparison with what `scripts/bench_serving.py` measured.

    python -m lab.simulation.simulate_clients --times docs/measurements/step_times_mixed_h200.json \
        --measured docs/measurements/serving_h200.json
    python -m lab.simulation.simulate_clients --times TABLE --believed OTHER_TABLE --spread 0.5

Each client sends its next request when the last one has ended; prompts are new. `--believed` is
the table that the scheduler begins with, where that is another one than `--times`, which says how
long steps take; it learns from those, as it does in a server. With `--spread 0.5` lengths are drawn
from half of what was asked to one and a half. With `--stall 32` so many streams decode instead, and
a prompt of 16,384 tokens comes, as with `scripts/bench_serving.py --stall`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import StepPlan
from jaxserve.step_times import StepTimes
from lab.simulation.simulator import Arrival, Result, Simulator

PAGE_SIZE = 64

HOST, PAUSE = 0.0008, 0.004
"""Seconds of a step that the engine's thread does not wait, and of a client between requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedTimes(StepTimes):
    """Remembers the mixed steps that it was asked about."""

    mixed_steps: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])
    """Tokens and decode rows of each."""

    def of(self, plan: StepPlan) -> float:
        if not plan.decode_only:
            rows = sum(not row.tokens for row in plan.rows)
            self.mixed_steps.append((plan.num_tokens, rows))
        return super().of(plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Times in milliseconds."""

    clients: int
    output_tok_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p99: float
    decode_steps: int
    mixed_steps: dict[int, int]
    """By bucket."""
    padding: float
    """Share of the tokens of all mixed steps."""
    decodes_per_mixed_step: float


def main() -> None:
    args = _parse()
    times = StepTimes.load(args.times)
    believed = StepTimes.load(args.believed or args.times)
    if args.stall:
        print(json.dumps(stall(args, times, believed)))
        return
    points = [point(args, times, believed, clients) for clients in args.concurrency]
    for each in points:
        print(json.dumps(dataclasses.asdict(each)))
    measured = json.loads(args.measured.read_text())["points"] if args.measured else []
    Console(width=140).print(table(points, {each["concurrency"]: each for each in measured}))


def _parse() -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=Path, required=True, help="how long steps take")
    parser.add_argument("--believed", type=Path, help="what the scheduler takes them to be")
    parser.add_argument("--measured", type=Path, help="a result of scripts/bench_serving.py")
    parser.add_argument("--concurrency", type=integers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.0, help="of both lengths, as a share")
    parser.add_argument("--rounds", type=int, default=4, help="requests per client")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--max-itl-ms", type=float, default=50.0)
    parser.add_argument("--kv-tokens", type=int, default=846_400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stall", type=int, metavar="STREAMS", help="see above")
    parser.add_argument("--stall-prompt", type=int, default=16_384, help="tokens of the long one")
    return parser.parse_args()


def simulator(args: argparse.Namespace, times: StepTimes, believed: StepTimes) -> Simulator:
    config = SchedulerConfig(
        max_num_seqs=256,
        max_model_len=40_960,
        max_num_batched_tokens=max(times.mixed),
        max_itl=args.max_itl_ms / 1e3,
        policy="slo",
    )
    cache = CacheConfig(num_pages=1 + args.kv_tokens // PAGE_SIZE, page_size=PAGE_SIZE)
    return Simulator(config, cache, times, known=believed, host=HOST)


def point(args: argparse.Namespace, times: StepTimes, believed: StepTimes, clients: int) -> Point:
    """One load."""
    watched = WatchedTimes(**{f.name: getattr(times, f.name) for f in dataclasses.fields(times)})
    load = traffic(args, clients)
    result = simulator(args, watched, believed).run(load, clients=clients, pause=PAUSE)
    return summary(clients, result, watched)


def stall(args: argparse.Namespace, times: StepTimes, believed: StepTimes) -> dict[str, float]:
    """Milliseconds to the first token of a long prompt, and between tokens of others meanwhile."""

    def arrival(number: int, at: float, prompt: int, output: int) -> Arrival:
        params = SamplingParams(max_tokens=output)
        request = Request(id=str(number), prompt=(number,) * prompt, params=params)
        return Arrival(at=at, request=request, output=output)

    streams = [arrival(number, 0.0, 64, 2_000) for number in range(args.stall)]
    sent = 2.0
    load = [*streams, arrival(args.stall, sent, args.stall_prompt, 2)]
    outcomes = simulator(args, times, believed).run(load).outcomes
    arrived = outcomes[-1].tokens[0]
    gaps = [
        later - earlier
        for outcome in outcomes[:-1]
        for earlier, later in pairwise(outcome.tokens)
        if sent <= later and earlier <= arrived
    ]
    return {
        "ttft_ms": round((arrived - sent) * 1e3, 1),
        "itl_p50_ms": _at(gaps, 0.5),
        "itl_max_ms": _at(gaps, 1.0),
    }


def traffic(args: argparse.Namespace, clients: int) -> list[Arrival]:
    rng = random.Random(f"{args.seed}/{clients}")

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + rng.uniform(-args.spread, args.spread))))

    def arrival(number: int) -> Arrival:
        prompt, output = length(args.prompt_tokens), length(args.output_tokens)
        params = SamplingParams(max_tokens=output)
        request = Request(id=str(number), prompt=(number,) * prompt, params=params)
        return Arrival(at=0.0, request=request, output=output)

    return [arrival(number) for number in range(max(args.min_requests, args.rounds * clients))]


def summary(clients: int, result: Result, watched: WatchedTimes) -> Point:
    ttfts = [outcome.ttft for outcome in result.outcomes if outcome.ttft is not None]
    tpots = [outcome.tpot for outcome in result.outcomes if outcome.tpot is not None]
    gaps = [
        after - before for outcome in result.outcomes for before, after in pairwise(outcome.tokens)
    ]
    sizes, steps = list(watched.mixed), watched.mixed_steps
    buckets = [sizes[bisect_left(sizes, tokens)] for tokens, _ in steps]
    return Point(
        clients=clients,
        output_tok_per_s=round(result.tokens_per_second, 1),
        ttft_p50=_at(ttfts, 0.5),
        ttft_p99=_at(ttfts, 0.99),
        tpot_p50=_at(tpots, 0.5),
        tpot_p99=_at(tpots, 0.99),
        itl_p99=_at(gaps, 0.99),
        decode_steps=result.steps - len(steps),
        mixed_steps=dict(sorted(Counter(buckets).items())),
        padding=round(1 - sum(tokens for tokens, _ in steps) / sum(buckets), 4),
        decodes_per_mixed_step=round(sum(rows for _, rows in steps) / len(steps), 1),
    )


def _at(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3, 2)


def table(points: list[Point], measured: dict[int, dict[str, Any]]) -> Table:
    """One row per point, measured values in brackets."""
    shown = Table(title="closed loop, simulated (measured)")
    columns = ("clients", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99")
    for column in (*columns, "decode steps", "mixed steps by bucket"):
        shown.add_column(column, justify="right")
    for each in points:
        found = measured.get(each.clients)

        def beside(value: float, digits: int, *keys: str, found: Any = found) -> str:
            for key in keys:
                found = found and found[key]
            return f"{value:.{digits}f}" + (f" ({found:.{digits}f})" if found else "")

        shown.add_row(
            str(each.clients),
            beside(each.output_tok_per_s, 0, "output_tok_per_s"),
            beside(each.ttft_p50, 1, "ttft_ms", "p50"),
            beside(each.ttft_p99, 0, "ttft_ms", "p99"),
            beside(each.tpot_p50, 2, "tpot_ms", "p50"),
            beside(each.tpot_p99, 2, "tpot_ms", "p99"),
            f"{each.itl_p99:.1f}",
            str(each.decode_steps),
            ", ".join(f"{bucket}: {count}" for bucket, count in each.mixed_steps.items()),
        )
    return shown


if __name__ == "__main__":
    main()
