"""Compare scheduling policies on mixed traffic, on simulated time.

    python scripts/simulate.py --study
    python scripts/simulate.py --times docs/measurements/step_times_h200.json --rate 10,20,40

Traffic is that of a published study of one GPU under mixed load (`datavorous/to-fa`): short and
long prompts with short and long answers, 41 : 10 : 28 : 21 %. Prompts are unique. A request is
good if its first token came within 5 s (short answers), or if 95 % of its tokens came within
250 ms of the one before and its answer is complete (long answers). Percentages are of all requests
sent; refused ones and those whose client left after 180 s are not good.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.admission import OutputLengths
from jaxserve.simulator import STOP, Arrival, Outcome, Result, Simulator
from jaxserve.step_times import StepTimes

TTFT_SLO, ITL_SLO, PATIENCE = 5.0, 0.25, 180.0

CLASSES = {
    # share, prompt tokens, output tokens, max_tokens: the ranges that the study observed and asked
    "siso": (0.414, (44, 101), (30, 120), (128, 512)),
    "silo": (0.103, (137, 157), (800, 1500), (2048, 3072)),
    "liso": (0.276, (481, 4594), (40, 250), (64, 256)),
    "lilo": (0.207, (555, 4665), (900, 2000), (1024, 2048)),
}

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
    """One row of the table."""

    name: str
    policy: str
    optimist: bool = False
    max_itl: float = 0.05
    deadlines: bool = False
    e2e: bool = False
    strict: bool = False


SETUPS = (
    Setup(name="fcfs, admits what fits now", policy="fcfs", optimist=True),
    Setup(name="fcfs", policy="fcfs"),
    Setup(name="priority to short answers", policy="priority"),
    Setup(name="slo", policy="slo"),
    Setup(name="slo with deadlines", policy="slo", deadlines=True),
    Setup(name="slo with all deadlines", policy="slo", deadlines=True, e2e=True),
    Setup(name="slo strict", policy="slo", deadlines=True, e2e=True, strict=True),
    Setup(name="same ITL 200 ms", policy="slo", deadlines=True, e2e=True, max_itl=0.2),
)


def main() -> None:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", action="store_true", help="the study's card, model and load")
    parser.add_argument("--times", type=Path, help="a table of scripts/measure_steps.py")
    parser.add_argument("--rate", type=numbers, default=[32.0], help="requests per second")
    parser.add_argument("--requests", type=int, default=725)
    parser.add_argument("--kv-tokens", type=int, default=450_000)
    parser.add_argument("--seed", type=int, default=67)
    args = parser.parse_args()
    if not args.study and args.times is None:
        parser.error("pass --study or --times")
    times = STUDY_TIMES if args.study else StepTimes.load(args.times)
    kv_tokens = 57_000 if args.study else args.kv_tokens
    table = Table(title=f"{args.requests} requests, KV cache of {kv_tokens} tokens")
    for column in ("rate", "setup", *CLASSES, "all", "good/s", "tok/s", "preempted", "min"):
        table.add_column(column, justify="left" if column == "setup" else "right")
    for rate in args.rate:
        for setup in SETUPS:
            began = time.perf_counter()
            result = run(setup, times, kv_tokens, traffic(rate, args.requests, args.seed, setup))
            table.add_row(f"{rate:g}", setup.name, *cells(result))
            took = time.perf_counter() - began
            print(f"{setup.name}: {result.seconds:.0f} s simulated in {took:.1f} s", flush=True)
    Console(width=120).print(table)


def traffic(rate: float, count: int, seed: int, setup: Setup) -> list[Arrival]:
    """Poisson arrivals; the same for every setup but for priorities and deadlines."""
    rng = random.Random(seed)
    names, weights = list(CLASSES), [shape[0] for shape in CLASSES.values()]
    arrivals: list[Arrival] = []
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        kind = rng.choices(names, weights)[0]
        _, prompt, output, most = CLASSES[kind]
        asked = rng.randint(*most)
        params = SamplingParams(max_tokens=asked, stop_token_ids=frozenset({STOP}))
        short = kind in ("siso", "liso")
        request = Request(
            id=f"{kind}-{number}",
            prompt=tuple(rng.randrange(150_000) for _ in range(rng.randint(*prompt))),
            params=params,
            priority=0 if short else 1,
            ttft_slo=0.5 if setup.strict else TTFT_SLO if setup.deadlines and short else None,
            e2e_slo=PATIENCE if setup.e2e else None,
        )
        length = min(rng.randint(*output), asked)
        arrivals.append(
            Arrival(at=now, request=request, output=length, kind=kind, patience=PATIENCE)
        )
    return arrivals


def run(setup: Setup, times: StepTimes, kv_tokens: int, arrivals: list[Arrival]) -> Result:
    config = SchedulerConfig(
        max_num_seqs=256,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_itl=setup.max_itl,
        policy=setup.policy,
        max_queued=100_000,
    )
    cache = CacheConfig(num_pages=1 + kv_tokens // 16, page_size=16)
    lengths = Optimist() if setup.optimist else None
    return Simulator(config, cache, times, host=0.0005, lengths=lengths).run(arrivals)


def good(outcome: Outcome) -> bool:
    if outcome.arrival.kind in ("siso", "liso"):
        return outcome.finished and outcome.ttft is not None and outcome.ttft <= TTFT_SLO
    gaps = sorted(b - a for a, b in zip(outcome.tokens, outcome.tokens[1:], strict=False))
    return outcome.finished and (not gaps or gaps[int(0.95 * (len(gaps) - 1))] <= ITL_SLO)


def cells(result: Result) -> list[str]:
    def share(outcomes: list[Outcome]) -> str:
        return f"{100 * sum(map(good, outcomes)) / max(len(outcomes), 1):.0f} %"

    outcomes = result.outcomes
    by_class = [[o for o in outcomes if o.arrival.kind == kind] for kind in CLASSES]
    return [
        *map(share, by_class),
        share(outcomes),
        f"{sum(map(good, outcomes)) / result.seconds:.2f}",
        f"{result.tokens_per_second:.0f}",
        f"{100 * result.preemptions / len(outcomes):.1f} %",
        f"{result.seconds / 60:.1f}",
    ]


if __name__ == "__main__":
    main()
