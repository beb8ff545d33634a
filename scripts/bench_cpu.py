"""Times the steps of a server on a CPU, and their compilation.

    python scripts/bench_cpu.py --out cpu.json
    python scripts/bench_cpu.py --compare cpu.json -- --dtype bfloat16

Flags after `--` are the server's. Without any, the embedded model runs with the default flags. Each
figure is the best wall time of several repeats, with the processor time of that repeat. On a busy
machine the wall time includes waits for other processes, the processor time does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.92)

import jax
from rich.console import Console
from rich.table import Table
from working_tree import commit

from jaxserve.api import SamplingParams
from jaxserve.cli.options import parse_args as parse_flags
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.programs.executables import obtain
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.startup.engine_plan import plan_engine
from jaxserve.weights.loading import weight_loader
from jaxserve.weights.model_source import find_model

PROMPTS = (16, 64, 256, 1024, 2048)
"""Prompt lengths in tokens. A prompt is read in chunks of the largest step."""

DECODES = ((1, 16), (1, 2000), (4, 256), (16, 256), (64, 16), (64, 256))
"""(rows, context length of each). The content of the cache does not affect the time."""

MIXED = ((48, 8, 256), (192, 32, 256), (224, 8, 1024))
"""(tokens of a new prompt, decode rows beside it, context of each)."""


class Timing(NamedTuple):
    """Milliseconds of the best repeat."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--compare", type=Path, help="figures of an earlier run")
    parser.add_argument("flags", nargs="*", help="flags of the server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner, config, compiling = compiled(["--cache-dir", folder, *args.flags])
    cases = dict(all_cases(runner, config))
    timings = {name: best(run, args.repeats) for name, run in cases.items()}
    result = described(args.flags, compiling, timings)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, json.loads(args.compare.read_text()) if args.compare else None)


def compiled(flags: list[str]) -> tuple[Runner, RunnerConfig, dict[str, float]]:
    """A runner as the server makes it at its start, and the seconds that compiling its programs
    took."""
    options = parse_flags(flags)
    source = find_model(options)
    plan = plan_engine(options, source)
    params = weight_loader(plan.weights, {})(lambda done, total: None)
    wall, cpu = time.perf_counter(), time.process_time()
    obtained = obtain(plan.steps, None, os.cpu_count() or 1, lambda phase, done: None)
    compiling = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    runner = Runner(plan.config, params, Metrics(source.names[0]))
    runner.start(obtained.executables, lambda phase, done: None)
    return runner, plan.config, compiling


def all_cases(runner: Runner, config: RunnerConfig) -> Any:
    """(name, function that runs it once) for each case that fits the buckets and the cache.

    Repeats of a case do the same work: sequences do not grow.
    """

    def ready(name: str, plans: list[StepPlan]) -> tuple[str, Callable[[], None]]:
        runner.collect(runner.launch(placed(plans[0], config)))
        return name, lambda: run(runner, plans)

    for tokens in PROMPTS:
        if tokens <= config.scheduler.max_model_len:
            yield ready(f"prompt of {tokens}", prompt(tokens, config))
    for rows, context in DECODES:
        if rows <= config.scheduler.max_num_seqs:
            plan = StepPlan(rows=decode_rows(rows, context))
            yield ready(f"{rows} rows at {context}", [plan])
    for tokens, rows, context in MIXED:
        if tokens + rows <= config.buckets.prefill[-1]:
            chunk = Row(rows, rows, 0, tuple(range(tokens)), True)
            plan = StepPlan(rows=(*decode_rows(rows, context), chunk))
            yield ready(f"chunk of {tokens} with {rows} rows at {context}", [plan])


def prompt(tokens: int, config: RunnerConfig) -> list[StepPlan]:
    """The steps that read one prompt."""
    ids = tuple(index % config.sampled_vocab for index in range(tokens))
    most = config.buckets.prefill[-1]
    return [
        StepPlan(rows=(Row(0, 0, start, ids[start : start + most], start + most >= tokens),))
        for start in range(0, tokens, most)
    ]


def decode_rows(count: int, context: int) -> tuple[Row, ...]:
    return tuple(Row(slot, slot, context, (), True) for slot in range(count))


def placed(plan: StepPlan, config: RunnerConfig) -> StepPlan:
    """The plan with pages for its slots, as many as a sequence may have. If the cache is too small,
    slots share the pages of late positions, so that many short contexts still have their own."""
    per_seq = config.pages_per_seq
    apart = min(per_seq, config.cache.usable_pages // len(plan.rows))
    return StepPlan(
        rows=plan.rows,
        admissions=tuple(
            Admission(row.slot, SamplingParams(max_tokens=1, temperature=0.0)) for row in plan.rows
        ),
        pages=tuple(
            PageEntry(row.slot, place, 1 + (number * apart + place) % config.cache.usable_pages)
            for number, row in enumerate(plan.rows)
            for place in range(per_seq)
        ),
    )


def run(runner: Runner, plans: list[StepPlan]) -> None:
    """Runs all plans, one step ahead, like the engine."""
    pending = None
    for plan in plans:
        launched = runner.launch(plan)
        if pending is not None:
            runner.collect(pending)
        pending = launched
    if pending is not None:
        runner.collect(pending)


def best(run: Callable[[], None], repeats: int) -> Timing:
    """The timing of the fastest repeat. Short cases are repeated for a second at most."""
    timings: list[Timing] = []
    end = time.perf_counter() + 1.0
    while len(timings) < repeats or (len(timings) < 10 * repeats and time.perf_counter() < end):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        timings.append(Timing(wall * 1e3, cpu * 1e3))
    return min(timings)


def described(
    flags: list[str], compiling: dict[str, float], timings: dict[str, Timing]
) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": commit(),
        "flags": flags,
        "compiling_s": compiling,
        "step_ms": {name: timing._asdict() for name, timing in timings.items()},
    }


def processor() -> str:
    """The processor's name, if the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")


def show(result: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    table = Table(title=f"commit {result['commit']}, load {result['load']:.1f}")
    columns = ("", "ms", "cpu ms", *(("ms before", "cpu before") if earlier else ()))
    for column in columns:
        table.add_column(column, justify="right")
    for name, timing in result["step_ms"].items():
        values = list(timing.values())
        if earlier:
            values += earlier["step_ms"].get(name, {}).values()
        table.add_row(name, *(f"{value:.1f}" for value in values))
    seconds = list(result["compiling_s"].values())
    if earlier:
        seconds += earlier["compiling_s"].values()
    table.add_row("compiling, s", *(f"{value:.1f}" for value in seconds))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
