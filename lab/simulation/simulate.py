"""Compare scheduling policies on mixed traffic, on simulated time.

    python -m lab.simulation.simulate --study
    python -m lab.simulation.simulate --times docs/measurements/step_times_h200.json --half
    python -m lab.simulation.simulate --times docs/measurements/step_times_h200.json --day

Traffic is that of a published study of one GPU under mixed load (`datavorous/to-fa`): short and
long prompts with short and long answers, 41 : 10 : 28 : 21 %. Prompts are unique. A request is
good if its first token came within 5 s (short answers), or if 95 % of its tokens came within
250 ms of the one before and its answer is complete (long answers); `--slo strict`: if its first
token came within 500 ms, those after it every 50 ms on average, and its answer is complete.
Percentages are of all requests sent; refused ones and those whose client left after 180 s are not
good. The policy `slo` is told these limits, as by `x-slo-ttft-ms` and `x-slo-e2e-ms`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.step_times import StepTimes
from lab.simulation.mixed_traffic import CLASSES, Load, is_good, traffic
from lab.simulation.simulator import Arrival, Outcome, Result, Simulator

HALF_WITHIN = 0.005
"""How near to 50 % the attainment in order of arrival must be at the rate that is looked for."""
PARTS_OF_HALF = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)

STUDY_TIMES = StepTimes(
    decode={1: 36e-3, 64: 38e-3, 256: 44e-3},
    mixed={64: 38e-3, 256: 54e-3, 512: 105e-3, 1024: 210e-3, 2048: 420e-3},
    decode_context=0.24e-6,
    mixed_context=0.24e-6,
    chunk_pair=8e-9,
)
"""Qwen2.5-14B in bfloat16 on an RTX 6000 Ada, computed and not measured: 29.5 GB of weights and
196,608 bytes of KV per token at 85 % of 960 GB/s, products at 145 TFLOP/s."""


class Optimist(OutputLengths):
    """Admits whatever fits now, as engines do that do not look ahead."""

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        return min(max_tokens, generated + 1), 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to schedule."""

    name: str
    policy: str
    optimist: bool = False
    max_itl: float = 0.05
    deadlines: bool = False
    prefix_caching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


FCFS = Setup(name="fcfs", policy="fcfs")
SLO = Setup(name="slo", policy="slo", deadlines=True)
SETUPS = (
    Setup(name="fcfs, admits what fits now", policy="fcfs", optimist=True),
    FCFS,
    Setup(name="priority to short answers", policy="priority"),
    Setup(name="slo, told no deadlines", policy="slo"),
    SLO,
    Setup(name="slo, steps up to 200 ms", policy="slo", deadlines=True, max_itl=0.2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """What came of a load under a setup."""

    setup: str
    rate: float
    seed: int
    slo: str
    requests: int
    attainment: dict[str, float]
    """Of each class, and of all."""
    goodput_requests_per_s: float
    """Over the time in which requests were sent."""
    goodput_tokens_per_s: float
    output_tokens_per_s: float
    """Until the end."""
    preempted: float
    """Preemptions per request."""
    refused: float
    simulated_s: float
    cpu_s: float
    """What the simulation took."""


def main() -> None:
    args = _parse()
    times = STUDY_TIMES if args.study else StepTimes.load(args.times)
    kv_tokens, page_size = (57_000, 16) if args.study else (args.kv_tokens, 64)
    cache = CacheConfig(num_pages=1 + kv_tokens // page_size, page_size=page_size)

    def measured(rate: float, seed: int, setup: Setup) -> Point:
        count = args.requests or max(1, round(rate * args.duration))
        load = Load(rate=rate, count=count, seed=seed, slo=args.slo, diurnal=args.day)
        result = point(setup, times, cache, load)
        print(json.dumps(dataclasses.asdict(result)), flush=True)
        return result

    def fcfs(rate: float) -> float:
        return mean(measured(rate, seed, FCFS).attainment["all"] for seed in args.seeds)

    setups = [setup for setup in SETUPS if not args.setup or setup.name in args.setup]
    half = half_rate(fcfs) if args.half else None
    rates = args.rate if half is None else [part * half for part in PARTS_OF_HALF]
    points = [
        measured(rate, seed, setup) for rate in rates for seed in args.seeds for setup in setups
    ]
    Console(width=120).print(table(points, kv_tokens))
    if args.output:
        described = {
            "simulated": True,
            "card": "RTX 6000 Ada, computed"
            if args.study
            else json.loads(args.times.read_text())["card"],
            "step_times": None if args.study else args.times.name,
            "kv_tokens": kv_tokens,
            "duration_s": args.duration,
            "half_rate": half,
            "points": [dataclasses.asdict(point) for point in points],
        }
        args.output.write_text(json.dumps(described, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    def floats(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--study", action="store_true", help="the study's card, model and load")
    parser.add_argument("--times", type=Path, help="a table of lab.simulation.measure_steps")
    parser.add_argument("--rate", type=floats, help="requests per second (32, or 0.25 by day)")
    parser.add_argument("--half", action="store_true", help="find the rate at which fcfs has 50 %%")
    parser.add_argument("--day", action="store_true", help="24 hours, busiest in the afternoon")
    parser.add_argument("--setup", action="append", help="only this row of the table (repeatable)")
    parser.add_argument("--requests", type=int, help="how many (default: rate times duration)")
    parser.add_argument("--duration", type=float, default=240.0, help="seconds of sending")
    parser.add_argument("--slo", choices=("study", "strict"), default="study")
    parser.add_argument("--kv-tokens", type=int, default=450_000)
    parser.add_argument("--seeds", type=integers, default=[67])
    parser.add_argument("--output", type=Path, help="write the points as JSON")
    args = parser.parse_args()
    if not args.study and args.times is None:
        parser.error("pass --study or --times")
    if args.study:
        args.requests = args.requests or 725
    if args.day:
        args.duration = 86_400.0
        args.setup = args.setup or [SLO.name]
    args.rate = args.rate or [0.25 if args.day else 32.0]
    return args


def half_rate(attainment: Callable[[float], float]) -> float:
    """Where it is one half; it falls with the rate."""
    low, high = 1.0, 2.0
    while attainment(high) > 0.5:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        found = attainment(middle)
        if abs(found - 0.5) < HALF_WITHIN or high - low < 0.02 * high:
            return middle
        low, high = (middle, high) if found > 0.5 else (low, middle)


def point(setup: Setup, times: StepTimes, cache: CacheConfig, load: Load) -> Point:
    """Simulate one load."""
    arrivals = traffic(load, deadlines=setup.deadlines)
    began = time.process_time()
    result = run(setup, times, cache, arrivals)
    took = time.process_time() - began
    good = [outcome for outcome in result.outcomes if is_good(outcome, load.slo)]
    sent = arrivals[-1].at
    by_class = {kind: [o for o in result.outcomes if o.arrival.kind == kind] for kind in CLASSES}
    return Point(
        setup=setup.name,
        rate=round(load.rate, 3),
        seed=load.seed,
        slo=load.slo,
        requests=load.count,
        attainment={
            kind: round(_share(outcomes, load.slo), 4)
            for kind, outcomes in (*by_class.items(), ("all", result.outcomes))
        },
        goodput_requests_per_s=round(len(good) / sent, 3),
        goodput_tokens_per_s=round(sum(len(outcome.tokens) for outcome in good) / sent, 1),
        output_tokens_per_s=round(result.tokens_per_second, 1),
        preempted=round(result.preemptions / load.count, 4),
        refused=round(sum(o.refused for o in result.outcomes) / load.count, 4),
        simulated_s=round(result.seconds, 1),
        cpu_s=round(took, 1),
    )


def run(setup: Setup, times: StepTimes, cache: CacheConfig, arrivals: list[Arrival]) -> Result:
    config = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_model_len=8192,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        prefix_caching=setup.prefix_caching,
        max_itl=setup.max_itl,
        policy=setup.policy,
        max_queued=100_000,
    )
    lengths = Optimist() if setup.optimist else None
    return Simulator(config, cache, times, host=0.0005, lengths=lengths).run(arrivals)


def _share(outcomes: Sequence[Outcome], slo: str) -> float:
    return sum(is_good(outcome, slo) for outcome in outcomes) / max(len(outcomes), 1)


def table(points: Sequence[Point], kv_tokens: int) -> Table:
    """One row per point."""
    shown = Table(title=f"{points[0].slo} limits, KV cache of {kv_tokens} tokens")
    columns = ("rate", "setup", *CLASSES, "all", "good/s", "tok/s", "preempted", "refused")
    for column in columns:
        shown.add_column(column, justify="left" if column == "setup" else "right")
    for each in points:
        shown.add_row(
            f"{each.rate:g}",
            each.setup,
            *(f"{100 * share:.0f} %" for share in each.attainment.values()),
            f"{each.goodput_requests_per_s:.2f}",
            f"{each.output_tokens_per_s:.0f}",
            f"{100 * each.preempted:.1f} %",
            f"{100 * each.refused:.1f} %",
        )
    return shown


if __name__ == "__main__":
    main()
