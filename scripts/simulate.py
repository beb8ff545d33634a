"""Compare scheduling policies on mixed traffic, on simulated time.

    python scripts/simulate.py --study
    python scripts/simulate.py --times docs/measurements/step_times_h200.json --half
    python scripts/simulate.py --times docs/measurements/step_times_h200.json --day

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
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.simulator import STOP, Arrival, Outcome, Result, Simulator
from jaxserve.step_times import StepTimes

PATIENCE = 180.0
HALF_WITHIN = 0.01
"""How near to 50 % the attainment in order of arrival must be at the rate that is looked for."""

CLASSES = {
    # share, prompt tokens, output tokens, max_tokens: the ranges that the study observed and asked
    "siso": (0.414, (44, 101), (30, 120), (128, 512)),
    "silo": (0.103, (137, 157), (800, 1500), (2048, 3072)),
    "liso": (0.276, (481, 4594), (40, 250), (64, 256)),
    "lilo": (0.207, (555, 4665), (900, 2000), (1024, 2048)),
}

SHORT_ANSWERS = ("siso", "liso")

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
class Load:
    """What is sent, and to what."""

    rate: float
    count: int
    seed: int
    slo: str
    """study or strict."""
    kv_tokens: int
    page_size: int


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
    took_s: float


def main() -> None:
    args = _parse()
    times = STUDY_TIMES if args.study else StepTimes.load(args.times)
    kv_tokens, page_size = (57_000, 16) if args.study else (args.kv_tokens, 64)

    def load(rate: float, seed: int) -> Load:
        count = args.requests or max(1, round(rate * args.duration))
        return Load(
            rate=rate,
            count=count,
            seed=seed,
            slo=args.slo,
            kv_tokens=kv_tokens,
            page_size=page_size,
        )

    def measured(rate: float, seed: int, setup: Setup) -> Point:
        result = point(setup, times, load(rate, seed))
        print(json.dumps(dataclasses.asdict(result)), flush=True)
        return result

    if args.day:
        measured(0.25, args.seeds[0], FCFS)
        return
    setups = [setup for setup in SETUPS if not args.setup or setup.name in args.setup]
    rates = args.rate
    if args.half:
        half = half_rate(lambda rate: measured(rate, args.seeds[0], FCFS).attainment["all"])
        rates = [part * half for part in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5)]
    points = [
        measured(rate, seed, setup) for rate in rates for seed in args.seeds for setup in setups
    ]
    Console(width=120).print(table(points, kv_tokens))
    if args.output:
        described = {
            "card": "RTX 6000 Ada, computed"
            if args.study
            else json.loads(args.times.read_text())["card"],
            "kv_tokens": kv_tokens,
            "duration_s": args.duration,
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
    parser.add_argument("--times", type=Path, help="a table of scripts/measure_steps.py")
    parser.add_argument("--rate", type=floats, default=[32.0], help="requests per second")
    parser.add_argument("--half", action="store_true", help="find the rate at which fcfs has 50 %%")
    parser.add_argument("--day", action="store_true", help="24 hours, 0.25 requests per second")
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


def traffic(load: Load, setup: Setup) -> list[Arrival]:
    """Poisson arrivals; the same for every setup but for priorities and deadlines."""
    rng = random.Random(load.seed)
    names, weights = list(CLASSES), [shape[0] for shape in CLASSES.values()]
    arrivals: list[Arrival] = []
    now = 0.0
    for number in range(load.count):
        now += rng.expovariate(load.rate)
        kind = rng.choices(names, weights)[0]
        _, prompt, output, most = CLASSES[kind]
        asked = rng.randint(*most)
        params = SamplingParams(max_tokens=asked, stop_token_ids=frozenset({STOP}))
        request = Request(
            id=f"{kind}-{number}",
            prompt=(number,) * rng.randint(*prompt),
            params=params,
            priority=0 if kind in SHORT_ANSWERS else 1,
            ttft_slo=ttft_limit(kind, load.slo) if setup.deadlines else None,
            e2e_slo=PATIENCE if setup.deadlines else None,
        )
        length = min(rng.randint(*output), asked)
        arrivals.append(
            Arrival(at=now, request=request, output=length, kind=kind, patience=PATIENCE)
        )
    return arrivals


def ttft_limit(kind: str, slo: str) -> float | None:
    """Seconds."""
    if slo == "strict":
        return 0.5
    return 5.0 if kind in SHORT_ANSWERS else None


def point(setup: Setup, times: StepTimes, load: Load) -> Point:
    """Simulate one load."""
    arrivals = traffic(load, setup)
    began = time.perf_counter()
    result = run(setup, times, load, arrivals)
    took = time.perf_counter() - began
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
        took_s=round(took, 1),
    )


def run(setup: Setup, times: StepTimes, load: Load, arrivals: list[Arrival]) -> Result:
    config = SchedulerConfig(
        max_num_seqs=256,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_itl=setup.max_itl,
        policy=setup.policy,
        max_queued=100_000,
    )
    cache = CacheConfig(num_pages=1 + load.kv_tokens // load.page_size, page_size=load.page_size)
    lengths = Optimist() if setup.optimist else None
    return Simulator(config, cache, times, host=0.0005, lengths=lengths).run(arrivals)


def is_good(outcome: Outcome, slo: str) -> bool:
    if not outcome.finished or outcome.ttft is None:
        return False
    limit = ttft_limit(outcome.arrival.kind, slo)
    if limit is not None and outcome.ttft > limit:
        return False
    if slo == "strict":
        return outcome.tpot is None or outcome.tpot <= 0.05
    if outcome.arrival.kind in SHORT_ANSWERS:
        return True
    gaps = sorted(b - a for a, b in zip(outcome.tokens, outcome.tokens[1:], strict=False))
    return not gaps or gaps[int(0.95 * (len(gaps) - 1))] <= 0.25


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
