"""Compare how routers spread traffic with shared prefixes over replicas, on simulated time.

    python -m lab.simulation.simulate_routing --output lab/measurements/routing_simulated.json

A simulation, not a measurement: measured step times of one card, the real scheduler and page pool,
and routers as in lab.simulation.routers. No network, no HTTP, no failure. A request is good if its
first token came within a second and those after it every 50 ms on average. What was sent in the
first 15 s is served, but not counted: caches are warm then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.step_times import StepTimes
from lab.simulation.fleet import Replica, Sent, poisson, serve
from lab.simulation.routers import routers, variants
from lab.simulation.simulator import Outcome

TTFT, TPOT = 1.0, 0.05
"""Seconds within which a request is good."""

WARM = 15.0
"""Seconds in which nothing is counted."""

TIMES = Path(__file__).parents[1] / "measurements" / "step_times_serving_h200.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Who sends what."""

    name: str
    rates: tuple[float, ...]
    """Requests per second to the fleet."""
    shared: int
    """Tokens of each tenant's prefix."""
    own: tuple[int, int] = (100, 500)
    output: tuple[int, int] = (50, 350)
    tenants: int = 160
    hot: float = 0.0
    """The share of the requests that the first tenant sends beside those of the others."""

    def shape(self, rng: random.Random) -> tuple[int, int, int, int]:
        tenant = 0 if rng.random() < self.hot else rng.randrange(self.tenants)
        return tenant, self.shared, rng.randint(*self.own), rng.randint(*self.output)


TRAFFIC = (
    Traffic(name="many prefixes", shared=6000, rates=(20, 40, 60, 80)),
    Traffic(name="one hot prefix", shared=6000, hot=0.6, rates=(20, 40, 60, 80)),
    Traffic(name="short prefixes", shared=256, own=(200, 1400), rates=(60, 120, 160)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """What came of a load under a router."""

    traffic: str
    router: str
    rate: float
    seed: int
    requests: int
    """Counted ones."""
    goodput: float
    """Good requests per second."""
    hit_rate: float
    """Share of the prompt tokens that were cached."""
    ttft_p50: float | None
    ttft_p95: float | None
    """Seconds; None if requests were refused."""
    tpot_p50: float
    refused: float
    imbalance: float
    """Requests of the replica that got most, over the mean."""


def is_good(outcome: Outcome) -> bool:
    ttft = outcome.ttft
    in_time = outcome.finished and ttft is not None and ttft <= TTFT
    return in_time and (outcome.tpot is None or outcome.tpot <= TPOT)


def point(traffic: Traffic, name: str, rate: float, seed: int, args: argparse.Namespace) -> Point:
    """Simulate one load with one router."""
    times = StepTimes.load(args.times)
    config = SchedulerConfig(max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=2048)
    cache = CacheConfig(num_pages=1 + args.kv_tokens // args.page_size, page_size=args.page_size)
    replicas = [Replica(config, cache, times) for _ in range(args.replicas)]
    known = routers(times.prefill_rate) | variants(times.prefill_rate)
    router = known[name](random.Random(seed))
    sent = poisson(rate, args.duration, seed, traffic.shape)
    served = list(serve(sent, router, replicas, page_size=args.page_size))
    counted = [each for each in served if each[0].at >= WARM]
    return _summary(traffic, name, rate, seed, counted, args)


def _summary(
    traffic: Traffic,
    name: str,
    rate: float,
    seed: int,
    counted: list[tuple[Sent, int, Outcome]],
    args: argparse.Namespace,
) -> Point:
    outcomes = [outcome for _, _, outcome in counted]
    tokens = sum(sent.shared + sent.own for sent, _, _ in counted)
    ttfts = sorted(o.ttft for o in outcomes if o.ttft is not None)
    tpots = sorted(o.tpot for o in outcomes if o.tpot is not None)
    places = [place for _, place, _ in counted]
    refused = sum(outcome.refused for outcome in outcomes)
    return Point(
        traffic=traffic.name,
        router=name,
        rate=rate,
        seed=seed,
        requests=len(outcomes),
        goodput=round(sum(map(is_good, outcomes)) / (args.duration - WARM), 2),
        hit_rate=round(sum(outcome.cached for outcome in outcomes) / tokens, 4),
        ttft_p50=None if refused else round(_quantile(ttfts, 0.5), 4),
        ttft_p95=None if refused else round(_quantile(ttfts, 0.95), 4),
        tpot_p50=round(_quantile(tpots, 0.5), 5),
        refused=round(refused / len(outcomes), 4),
        imbalance=round(max(map(places.count, set(places))) * args.replicas / len(places), 3),
    )


def _quantile(values: list[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]


def main() -> None:
    args = _parse()
    points: list[Point] = []
    for traffic in TRAFFIC:
        if args.traffic and traffic.name not in args.traffic:
            continue
        for rate in args.rate or traffic.rates:
            for seed in args.seeds:
                for name in args.router or routers(1.0):
                    points.append(point(traffic, name, rate, seed, args))
                    print(json.dumps(dataclasses.asdict(points[-1])), flush=True)
    Console(width=110).print(table(points))
    if args.output:
        args.output.write_text(json.dumps(described(args, points), indent=1) + "\n")


def described(args: argparse.Namespace, points: list[Point]) -> dict[str, object]:
    """Returns what the file of results holds."""
    measured = json.loads(args.times.read_text())
    return {
        "simulated": True,
        "commit": args.commit,
        "command": "python -m lab.simulation.simulate_routing",
        "card": measured["card"],
        "model": measured["model"],
        "step_times": args.times.name,
        **{name: getattr(args, name) for name in ("replicas", "kv_tokens", "page_size")},
        "duration_s": args.duration,
        "warm_s": WARM,
        "good": {"ttft_s": TTFT, "tpot_s": TPOT},
        "traffic": [dataclasses.asdict(each) for each in TRAFFIC],
        "points": [dataclasses.asdict(each) for each in points],
    }


def table(points: list[Point]) -> Table:
    shown = ("traffic", "rate", "router", "goodput", "hit_rate", "ttft_p95", "imbalance")
    made = Table(*shown)
    for each in points:
        made.add_row(*(str(getattr(each, name)) for name in shown))
    return made


def _parse() -> argparse.Namespace:
    def parts[T](of: Callable[[str], T]) -> Callable[[str], list[T]]:
        return lambda text: [of(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=Path, default=TIMES, help="a table of measure_steps")
    parser.add_argument("--traffic", action="append", choices=[each.name for each in TRAFFIC])
    parser.add_argument("--router", action="append", choices=[*routers(1.0), *variants(1.0)])
    parser.add_argument("--rate", type=parts(float), help="requests per second (default: several)")
    parser.add_argument("--seeds", type=parts(int), default=[1])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kv-tokens", type=int, default=450_000, help="of each replica")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--duration", type=float, default=50.0, help="seconds of sending")
    parser.add_argument("--commit", help="named in the file")
    parser.add_argument("--output", type=Path, help="write the points as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
