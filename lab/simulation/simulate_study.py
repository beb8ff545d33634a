"""A published study of one GPU under mixed traffic, simulated, beside what it published.

    python -m lab.simulation.simulate_study --output docs/measurements/study_simulated.json

`datavorous/to-fa` sent 725 requests of four classes, 32 per second, to vLLM 0.8.5 with
Qwen2.5-14B on an RTX 6000 Ada, in seven configurations. Here jaxserve's scheduler gets that
traffic on simulated time, in the same configurations: once in order of arrival, admitting whatever
fits now, as an engine does that does not look ahead, and once with the policy `slo`. Step times
are computed from the card's rates, not measured. The limits behind the study's percentages are
not published; `simulate.py` beside this says which are meant here. As the study's numbers seem to
be, the percentage is the mean of the four classes'.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jaxserve.config import CacheConfig
from jaxserve.step_times import StepTimes
from lab.simulation.mixed_traffic import CLASSES, Load
from lab.simulation.simulate import STUDY_TIMES, Point, Setup, point

KV_TOKENS, PAGE = 57_000, 16

INT4_TIMES = dataclasses.replace(
    STUDY_TIMES,
    decode={1: 11e-3, 64: 20e-3, 256: 44e-3},
    mixed={**STUDY_TIMES.mixed, 64: 20e-3},
)
"""The same card with int4 weights: 8.4 GB are read instead of 27.9; prompts take what products
take in bfloat16."""

INT4_KV_TOKENS = 156_000
"""What 19.5 GB less of weights leave."""


class Configuration(NamedTuple):
    """One of the study's, what it published of it, and what makes it here."""

    name: str
    tokens_per_s: float
    compliance: float
    """Percent."""
    prefix_caching: bool = False
    chunked: bool = False
    """Steps of at most 2,048 tokens; otherwise prompts are computed whole."""
    int4: bool = False
    max_num_seqs: int = 256


CONFIGURATIONS = (
    Configuration("baseline", 144, 11.25),
    Configuration("prefix cache", 661, 60.25, prefix_caching=True),
    Configuration("chunked prefill", 251, 20.75, chunked=True),
    Configuration("AWQ", 189, 1.75, int4=True),
    Configuration("AWQ and chunked", 197, 6.5, chunked=True, int4=True),
    Configuration("32 sequences", 334, 24.75, max_num_seqs=32),
    Configuration("prefix cache and chunked", 664, 60.5, prefix_caching=True, chunked=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=67)
    parser.add_argument("--output", type=Path, help="write the points as JSON")
    args = parser.parse_args()
    load = Load(rate=32.0, count=725, seed=args.seed, slo="study", replayed=True)
    rows: list[tuple[Configuration, Point, Point]] = []
    for each in CONFIGURATIONS:
        rows.append((each, simulated(each, "fcfs", load), simulated(each, "slo", load)))
        print(f"{each.name}: simulated", flush=True)
    Console(width=150).print(table(rows))
    if args.output:
        matrix = {
            each.name: {
                "published": {"tokens_per_s": each.tokens_per_s, "compliance": each.compliance},
                "fcfs": dataclasses.asdict(fcfs),
                "slo": dataclasses.asdict(slo),
            }
            for each, fcfs, slo in rows
        }
        args.output.write_text(json.dumps({"simulated": True, "matrix": matrix}, indent=1) + "\n")


def simulated(configuration: Configuration, policy: str, load: Load) -> Point:
    setup = Setup(
        name=f"{configuration.name}, {policy}",
        policy=policy,
        optimist=policy == "fcfs",
        deadlines=policy == "slo",
        max_itl=0.05 if policy == "slo" else float("inf"),
        prefix_caching=configuration.prefix_caching,
        max_num_seqs=configuration.max_num_seqs,
        max_num_batched_tokens=2048 if configuration.chunked else 8192,
    )
    times, kv_tokens = _card(configuration.int4)
    cache = CacheConfig(num_pages=1 + kv_tokens // PAGE, page_size=PAGE)
    return point(setup, times, cache, load)


def _card(int4: bool) -> tuple[StepTimes, int]:
    times, kv_tokens = (INT4_TIMES, INT4_KV_TOKENS) if int4 else (STUDY_TIMES, KV_TOKENS)
    largest = times.mixed[2048]
    longer = {tokens: largest * tokens / 2048 for tokens in (4096, 8192)}
    return dataclasses.replace(times, mixed={**times.mixed, **longer}), kv_tokens


def compliance(of: Point) -> float:
    """Percent: the mean of the classes."""
    return 100 * mean(of.attainment[kind] for kind in CLASSES)


def table(rows: list[tuple[Configuration, Point, Point]]) -> Table:
    """A configuration per row: published, in order of arrival, by deadline."""
    shown = Table(title="the study's configurations: good requests, mean of the classes, and tok/s")
    shown.add_column("configuration")
    for title in ("published", "tok/s", "fcfs", *CLASSES, "tok/s", "slo", *CLASSES, "tok/s"):
        shown.add_column(title, justify="right")
    for each, fcfs, slo in rows:
        cells = [f"{each.compliance:.0f} %", f"{each.tokens_per_s:.0f}"]
        for found in (fcfs, slo):
            cells.append(f"{compliance(found):.0f} %")
            cells.extend(f"{100 * found.attainment[kind]:.0f}" for kind in CLASSES)
            cells.append(f"{found.output_tokens_per_s:.0f}")
        shown.add_row(each.name, *cells)
    return shown


if __name__ == "__main__":
    main()
