"""Times the compiled steps of a model against the memory floor of the card.

    python scripts/bench_step.py --model qwen3-4b --batch 1,8,64 --context 1024 --out step.json
    python scripts/bench_step.py --compare before.json ...
    python scripts/bench_step.py --quantization int4 --compare bfloat16.json --assert-ratio 1.0

`scripts/bench_pair.py` compares two versions on one card, in turns.

Every step runs as in the engine: from the scheduler's plan, one step ahead. The floor is the time
to move the step's bytes at the bandwidth of a large copy, measured in the same process. The bytes
are the weights, the keys and values of the sequences as stored in full pages, and the state of
recurrent layers (read and written). Of the experts, only those that the timed rows used are
counted: the same steps run again with a router that counts.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.92)


import jax
import jax.numpy as jnp
from card_rates import copy_bandwidth
from decode_steps import decode_plans, fits, step_bytes
from kernel_profile import KernelRun, kernel_runs
from random_weights import LAYER_FORMATS, encoder
from rich.console import Console
from rich.table import Table
from step_report import Timing, assert_never_slower, show
from touched_experts import touched_experts
from turns import turn
from working_tree import commit

from jaxserve.config import Buckets, SchedulerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.plan import StepPlan
from jaxserve.runner import kv_cache
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.weights.fp8_copy import copying_programs, with_copies
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels.kv_format import NAMES, named
from jaxserve_kernels.paged_attention import tile_tokens
from jaxserve_kernels.records import installed

WARM = 8
"""Untimed steps before the timed ones."""
PROFILED = 8
"""Steps of a profile."""


def main() -> None:
    args = parse_args()
    spec = NAMED_MODELS[args.model]
    with turn(args.turns):
        bandwidth = copy_bandwidth()
        runner, config, params = make_runner(spec, args)
    start = time.perf_counter()
    runner.compile(os.cpu_count() or 1, lambda name, done: None)
    print(f"compiled {len(config.all_buckets())} buckets in {time.perf_counter() - start:.1f} s")
    rounds: list[list[Timing]] = []
    for _ in range(args.rounds):
        with turn(args.turns):
            rounds.append(
                [
                    time_decode(runner, config, params, batch, context, bandwidth, args)
                    for context in args.context
                    for batch in args.batch
                    if fits(config, batch, context, args.steps + WARM)
                ]
            )
    timings = [middle(times) for times in zip(*rounds, strict=True)]
    if config.spec.experts:
        runner.free_state()
        timings = over_touched(timings, config, params, bandwidth, args)
        runner.reset()
    result = describe(args, bandwidth, timings)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.profile:
        with turn(args.turns):
            for batch in args.batch:
                if fits(config, batch, args.context[0], PROFILED + WARM):
                    profile(runner, config, batch, args.context[0], args.temperature)
    earlier = json.loads(args.compare.read_text()) if args.compare else None
    show(result, earlier)
    if earlier and args.assert_ratio:
        assert_never_slower(result, earlier, args.assert_ratio)


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--batch", type=sizes, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument(
        "--buckets", type=sizes, help="compiled sizes; a batch between them is padded"
    )
    parser.add_argument("--context", type=sizes, default=[1024])
    parser.add_argument("--steps", type=int, default=64, help="timed steps per bucket")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds over all timings; the median counts"
    )
    parser.add_argument(
        "--turns", type=Path, metavar="FILE", help="use the card only while this file is locked"
    )
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument(
        "--separate-layers", action="store_true", help="one array per weight and layer"
    )
    parser.add_argument("--quantization", choices=LAYER_FORMATS)
    parser.add_argument("--lm-head-dtype", choices=("int8", "fp8"))
    parser.add_argument(
        "--fp8-copy", action="store_true", help="add fp8 copies of 4-bit weights, as served"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="0: all rows have the same tokens, and the same experts; default: 1 with experts",
    )
    parser.add_argument("--kv-cache-dtype", choices=NAMES, default="auto")
    parser.add_argument("--page-size", type=int, default=64, help="unless the format fixes it")
    parser.add_argument("--kv-gib", type=float, default=46.0)
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of each step goes, by kernel"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--compare", type=Path, help="an earlier result to compare with")
    parser.add_argument(
        "--assert-ratio",
        type=float,
        help="fail if a step takes more than this many times its time in --compare",
    )
    args = parser.parse_args()
    if args.temperature is None:
        args.temperature = 1.0 if NAMED_MODELS[args.model].experts else 0.0
    if args.buckets and max(args.batch) > max(args.buckets):
        parser.error(f"no bucket for {max(args.batch)} rows: --buckets ends at {max(args.buckets)}")
    if args.assert_ratio and not args.compare:
        parser.error("--assert-ratio needs the result of --compare")
    return args


class Timed(Protocol):
    @property
    def step_ms(self) -> float: ...


def middle[T: Timed](rounds: tuple[T, ...]) -> T:
    """The round whose step time is the median, or the one below it."""
    return sorted(rounds, key=lambda each: each.step_ms)[(len(rounds) - 1) // 2]


def make_runner(
    spec: ModelSpec, args: argparse.Namespace
) -> tuple[Runner, RunnerConfig, decoder.Params]:
    """A runner without programs, its configuration and its weights."""
    if args.layers:
        spec = dataclasses.replace(spec, layers=spec.layers[: args.layers])
    kv_format = named(args.kv_cache_dtype)
    page_size, longest = kv_format.page_size or args.page_size, 40_960
    most = max(args.buckets or args.batch)
    groups = kv_cache.sized_groups(spec, page_size, most)
    demand = kv_cache.Demand(longest, most, 512)
    budget = int(args.kv_gib * 2**30)
    pages = kv_cache.fit_pages(kv_format, groups, jnp.bfloat16, budget, demand)
    config = RunnerConfig(
        spec=spec,
        cache=kv_cache.cache_config(spec, pages, page_size, kv_format.own_tokens),
        scheduler=SchedulerConfig(
            max_num_seqs=most,
            max_model_len=longest,
            max_num_batched_tokens=512,
            max_chunk_context=kv_format.max_chunk_context(longest, page_size=page_size),
        ),
        buckets=Buckets(decode=tuple(sorted(set(args.buckets or args.batch))), prefill=(512,)),
        dtype=jnp.bfloat16,
        sampled_vocab=spec.vocab_size,
        tile_size=tile_tokens(spec.q_heads // spec.kv_heads),
        kv_format=kv_format,
    )
    abstract = decoder.abstract(spec, jnp.bfloat16, stacked=not args.separate_layers)
    params = dummy_params(abstract, 0, encoder(spec, args.quantization, args.lm_head_dtype))
    if args.fp8_copy:
        params = copied(params)
    return Runner(config, params, Metrics("bench")), config, params


def copied(params: decoder.Params) -> decoder.Params:
    """Adds an fp8 copy to each 4-bit weight."""
    programs = {each.name: jax.jit(each.function) for each in copying_programs(params)}
    return with_copies(params, programs)


def time_decode(
    runner: Runner,
    config: RunnerConfig,
    params: decoder.Params,
    batch: int,
    context: int,
    bandwidth: float,
    args: argparse.Namespace,
) -> Timing:
    """Times decode steps of sequences of `context` tokens. Keys and values are whatever the pages
    contain.

    Raises:
      RuntimeError: a row's logits are NaN. Routers then choose the same experts for all rows.
    """
    plans = decode_plans(config, batch, context, args.steps + WARM, args.temperature)
    for plan in plans[:WARM]:
        pending = runner.launch(plan)
    runner.collect(pending)
    pending = None
    host: list[float] = []
    ends = [time.perf_counter()]
    for plan in plans[WARM:]:
        before = time.perf_counter()
        launched = runner.launch(plan)
        host.append(time.perf_counter() - before)
        if pending is not None:
            runner.collect(pending)
            ends.append(time.perf_counter())
        pending = launched
    last = runner.collect(pending)
    ends.append(time.perf_counter())
    if any(row is None or row.token is None for row in last):
        raise RuntimeError(f"batch {batch}: logits are NaN, the times mean nothing")
    moved = step_bytes(config, params, batch, context)
    bucket = next(each for each in config.buckets.decode if each >= batch)
    kernels, temp = runner.describe_decode(bucket)
    return Timing(
        batch=batch,
        context=context,
        step_ms=median(after - before for before, after in itertools.pairwise(ends)) * 1e3,
        mean_ms=(ends[-1] - ends[0]) / args.steps * 1e3,
        host_ms=median(host) * 1e3,
        floor_ms=moved / bandwidth * 1e3,
        kernels=kernels,
        temp_mb=temp / 2**20,
    )


def over_touched(
    timings: list[Timing],
    config: RunnerConfig,
    params: decoder.Params,
    bandwidth: float,
    args: argparse.Namespace,
) -> list[Timing]:
    """Adds floors that count the experts that the rows used. The same steps run again to find
    them."""
    runs = (
        decode_plans(config, each.batch, each.context, args.steps + WARM, args.temperature)
        for each in timings
    )
    found: list[Timing] = []
    for each, experts in zip(timings, touched_experts(config, params, runs, WARM), strict=True):
        moved = step_bytes(config, params, each.batch, each.context, experts)
        floor_ms = moved / bandwidth * 1e3
        found.append(dataclasses.replace(each, floor_ms=floor_ms, experts=experts))
    return found


def profile(
    runner: Runner, config: RunnerConfig, batch: int, context: int, temperature: float
) -> None:
    plans = decode_plans(config, batch, context, PROFILED + 4, temperature)
    profile_plans(runner, plans, f"batch {batch}, context {context}")


def profile_plans(runner: Runner, plans: list[StepPlan], what: str) -> None:
    """Prints the kernels of a step by their time. The first four plans warm up."""
    steps = len(plans) - 4
    for plan in plans[:4]:
        runner.collect(runner.launch(plan))

    def run() -> None:
        launched = [runner.launch(plan) for plan in plans[4:]]
        runner.collect(launched[-1])

    runs: dict[str, list[KernelRun]] = collections.defaultdict(list)
    for each in kernel_runs(run):
        runs[each.name].append(each)
    adds = {name: sum(each.adds_us for each in found) for name, found in runs.items()}
    table = Table(title=f"kernels of a step: {what}")
    for column in ("kernel", "per step", "us each", "adds us per step"):
        table.add_column(column, justify="right")
    for name in sorted(runs, key=adds.__getitem__, reverse=True)[:25]:
        table.add_row(
            name[:60],
            f"{len(runs[name]) / steps:.1f}",
            f"{median(each.us for each in runs[name]):.2f}",
            f"{adds[name] / steps:.1f}",
        )
    table.add_row("all", "", "", f"{sum(adds.values()) / steps:.1f}")
    Console(width=110).print(table)


def describe(args: argparse.Namespace, bandwidth: float, timings: list[Timing]) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "card": device.device_kind,
        "jax": jax.__version__,
        "triton": installed("triton"),
        "commit": commit(),
        "driver": device.client.platform_version,
        "python": platform.python_version(),
        "model": args.model,
        "layers": args.layers,
        "quantization": args.quantization,
        "lm_head_dtype": args.lm_head_dtype,
        "fp8_copy": args.fp8_copy,
        "kv_cache_dtype": args.kv_cache_dtype,
        "temperature": args.temperature,
        "copy_tb_per_s": bandwidth / 1e12,
        "timings": [dataclasses.asdict(timing) for timing in timings],
    }


if __name__ == "__main__":
    main()
