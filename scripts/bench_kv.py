"""Measures throughput of KV formats over the number of clients, in closed loops.

    python scripts/bench_kv.py --model qwen3-4b --budget 30 --out docs/measurements/kv_sweep.json
    python scripts/bench_kv.py --loads 8192/256 --clients 1,8,32 --formats bf16,fp8_e4m3
    python scripts/bench_kv.py --model jaxserve-embedded --loads 64/16,300/40 --clients 1,4 \\
        --kv-gib 0.2 --max-model-len 512 --prefill 64,256     # on a CPU, too

Scheduler and device run in one process as in serving, one step ahead, without HTTP. The weights are
loaded once. Each format gets the same bytes for its cache, and its own compiled steps. Every client
sends its next request, of random tokens, when the previous one has ended. Compilations during the
load are counted.

At each point the formats take turns, forwards and then backwards, until the first format has run
for --seconds. So other load on the machine, and its temperature, affect all formats alike. Each run
is compared with the first format's run in the same turn. The result is the median of the runs and
the median of these ratios, shown with the smallest and largest ratio. All runs are written.

Compiling takes longer than most points. --cache-dir keeps the programs; --compile-only does nothing
else. One process per format can compile at the same time, if XLA_CLIENT_MEM_FRACTION divides the
card's memory among them.

Each point is printed and written when it is done. After --budget minutes no new point begins; the
same command continues from the content of --out. The plot is drawn beside it (.svg).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.startup.environment import compiler_options, compiler_settings, prepare

prepare(gpu_memory_utilization=0.92)

import jax
import jax.numpy as jnp
from kv_formats import kv_formats
from kv_report import compared, plot, show
from kv_steps import encode_share

from jaxserve.api import Request, SamplingParams
from jaxserve.config import Buckets, ConfigError, SchedulerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.programs.executable_cache import Executable, ExecutableCache
from jaxserve.programs.executables import obtain, on_compile
from jaxserve.runner import kv_cache
from jaxserve.runner.fingerprint import program_key
from jaxserve.runner.programs import RunnerConfig, programs
from jaxserve.runner.runner import Pending, Runner
from jaxserve.scheduler import Scheduler
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.resolve import EMBEDDED_NAME, embedded_model
from jaxserve_kernels.kv_format import NAMES, named

DENSE_PAGE = 64


class Load(NamedTuple):
    """Tokens of each request."""

    prompt: int
    output: int


class CompileCounter:
    """Counts XLA compilations since the last call of `take`."""

    def __init__(self) -> None:
        self._count = 0
        on_compile(self._compiled)

    def _compiled(self) -> None:
        self._count += 1

    def take(self) -> int:
        count, self._count = self._count, 0
        return count


def main() -> None:
    args = parse_args()
    budget = Budget(args.budget)
    spec = spec_of(args.model)
    params = decoder.abstract(spec, args.dtype, stacked=args.stacked)
    if not args.compile_only:
        params = dummy_params(params, 0)
    try:
        served = [make_served(spec, params, name, args) for name in args.formats]
    except ConfigError as error:
        what, _, _ = str(error).partition(";")  # the rest names the server's flags
        raise SystemExit(
            f"{what}; raise --kv-gib, or lower --max-model-len or --clients"
        ) from error
    with ThreadPoolExecutor(len(served)) as pool:
        list(pool.map(lambda each: each.compile(args.cache_dir), served))
    if args.compile_only:
        return
    result = earlier(args)
    compiles = CompileCounter()
    for each in served:
        entry = result["formats"].setdefault(each.name, {"points": {}})
        entry |= capacity(each.config, args.capacity_context)
    for load, clients in wanted(args):
        if budget.spent:
            break
        if not all(point_name(load, clients) in each["points"] for each in entries(result, args)):
            measure(served, result, load, clients, compiles, args)
            keep(result, args.out)
    for each in served:
        entry = result["formats"][each.name]
        if not budget.spent and "encode" not in entry:
            entry["encode"] = encode_share(each.start(), each.config, args.clients[-1])
            keep(result, args.out)
    show(result)
    if args.out:
        plot(result, args.out.with_suffix(".svg"))


def entries(result: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    return [result["formats"][name] for name in args.formats]


def measure(
    served: Sequence[Served],
    result: dict[str, Any],
    load: Load,
    clients: int,
    compiles: CompileCounter,
    args: argparse.Namespace,
) -> None:
    """Measures one point of each format."""
    runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in served}
    order = list(served)
    while sum(run["seconds"] for run in runs[served[0].name]) < args.seconds:
        for each in order:
            run = each.run(load, clients, args.rounds, compiles)
            result["compiles"] += run.pop("compiles")
            runs[each.name].append(run)
        order.reverse()
    for name, point in compared(runs).items():
        result["formats"][name]["points"][point_name(load, clients)] = point
        print(json.dumps({"format": name} | point), flush=True)


def wanted(args: argparse.Namespace) -> list[tuple[Load, int]]:
    """The points to measure, the same for every format."""
    return [
        (load, clients)
        for load in args.loads
        for clients in args.clients
        if clients * (load.prompt + load.output) <= args.most_tokens
    ]


def point_name(load: Load, clients: int) -> str:
    return f"{load.prompt}/{load.output} {clients}"


class Budget:
    """Minutes after which nothing new begins; None: no limit."""

    def __init__(self, minutes: float | None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._said = False

    @property
    def spent(self) -> bool:
        over = time.monotonic() > self._end
        if over and not self._said:
            print("the budget is spent; the same command goes on from here", flush=True)
            self._said = True
        return over


def earlier(args: argparse.Namespace) -> dict[str, Any]:
    """The content of --out, if it has the same settings; ValueError if it does not."""
    head = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": args.model,
        "kv_gib": args.kv_gib,
        "rounds": args.rounds,
        "seconds": args.seconds,
    }
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
        if head.items() - found.items():
            raise ValueError(f"{args.out} has other settings: remove it, or choose another file")
        return found
    return head | {"compiles": 0, "formats": {}}


def keep(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


def spec_of(model: str) -> ModelSpec:
    if model == EMBEDDED_NAME:
        return registry.spec_of(json.loads((embedded_model() / "config.json").read_text()))
    return NAMED_MODELS[model]


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def loads(text: str) -> list[Load]:
        return [Load(*map(int, part.split("/"))) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", choices=[EMBEDDED_NAME, *sorted(NAMED_MODELS)], default="qwen3-4b"
    )
    parser.add_argument("--formats", type=kv_formats, default=list(NAMES[1:]))
    parser.add_argument("--loads", type=loads, default=loads("512/128,8192/256"))
    parser.add_argument("--clients", type=sizes, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--decode", type=sizes, help="decode buckets, if not one per --clients")
    parser.add_argument("--rounds", type=int, default=2, help="requests per client")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="total time of the first format's runs per point"
    )
    parser.add_argument("--kv-gib", type=float, default=48.0, help="bytes of every format's cache")
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=320_000,
        help="skip points with more tokens in the cache",
    )
    parser.add_argument("--capacity-context", type=int, default=4096)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--prefill", type=sizes, default=[64, 768, 2048], help="mixed buckets")
    parser.add_argument("--cache-dir", type=Path, help="folder for compiled programs")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--budget", type=float, help="begin no point after this many minutes")
    parser.add_argument("--out", type=Path, help="write the result as JSON, and continue from it")
    args = parser.parse_args()
    args.max_model_len = min(args.max_model_len, spec_of(args.model).max_position)
    for load in args.loads:
        if load.prompt + load.output > args.max_model_len:
            parser.error(
                f"--loads: {load.prompt}/{load.output} exceeds {args.max_model_len} tokens, the "
                "smaller of --max-model-len and the model's own limit"
            )
    args.stacked = jax.default_backend() == "gpu"
    args.dtype = jnp.bfloat16 if args.stacked else jnp.float32
    return args


@dataclasses.dataclass(kw_only=True)
class Served:
    """A format with its compiled steps. Only one format has a cache at a time."""

    name: str
    config: RunnerConfig
    params: decoder.Params
    executables: Mapping[str, Executable] = dataclasses.field(default_factory=dict)

    def compile(self, folder: Path | None) -> None:
        start = time.perf_counter()
        options = compiler_options(gpu=jax.default_backend() == "gpu")
        found = [
            dataclasses.replace(each, compiler_options=options)
            for each in programs(self.config, self.params)
        ]
        cache = None
        if folder is not None:
            settings = compiler_settings() | {name: str(value) for name, value in options.items()}
            key = program_key(self.config, self.params, settings, jax.devices()[0])
            cache = ExecutableCache(folder, key, self.name)
        workers = os.cpu_count() or 1
        self.executables = obtain(found, cache, workers, lambda name, done: None).executables
        print(f"{self.name}: {len(found)} programs in {time.perf_counter() - start:.1f} s")

    def start(self) -> Runner:
        """A runner with an empty cache, whose steps have been run once to warm up."""
        gc.collect()  # frees the previous runner's cache
        runner = Runner(self.config, self.params, Metrics("bench"))
        runner.start(self.executables, lambda name, done: None)
        return runner

    def run(
        self, load: Load, clients: int, rounds: int, compiles: CompileCounter
    ) -> dict[str, Any]:
        runner = self.start()
        compiles.take()
        return run_point(runner, self.config, load, clients, rounds) | {"compiles": compiles.take()}


def make_served(
    spec: ModelSpec, params: decoder.Params, name: str, args: argparse.Namespace
) -> Served:
    """The format with steps for all buckets and a cache of --kv-gib."""
    kv_format = named(name)
    page_size = kv_format.page_size or DENSE_PAGE
    decode = tuple(sorted(args.decode or args.clients))
    most = decode[-1]
    groups = kv_cache.sized_groups(spec, page_size, most)
    demand = kv_cache.Demand(args.max_model_len, most, args.prefill[-1])
    budget = int(args.kv_gib * 2**30)
    pages = kv_cache.fit_pages(kv_format, groups, args.dtype, budget, demand)
    config = RunnerConfig(
        spec=spec,
        cache=kv_cache.cache_config(spec, pages, page_size, kv_format.own_tokens),
        scheduler=SchedulerConfig(
            max_num_seqs=most,
            max_model_len=args.max_model_len,
            max_num_batched_tokens=args.prefill[-1],
            max_chunk_context=kv_format.max_chunk_context(args.max_model_len, page_size=page_size),
        ),
        buckets=Buckets(decode=decode, prefill=tuple(args.prefill)),
        dtype=args.dtype,
        sampled_vocab=spec.vocab_size,
        tile_size=32,
        kv_format=kv_format,
    )
    return Served(name=name, config=config, params=params)


def capacity(config: RunnerConfig, context: int) -> dict[str, Any]:
    """Tokens that the cache holds, and how many sequences of `context` tokens."""
    (shape,) = config.kv_shapes
    per_sequence = -(-context // shape.page_size)
    return {
        "page_bytes": config.kv_format.page_bytes(shape, config.dtype),
        "fixed_bytes": config.kv_format.fixed_bytes(shape, config.dtype),
        "tokens": config.cache.usable_tokens,
        "sequences": config.cache.usable_pages // per_sequence,
    }


def run_point(
    runner: Runner, config: RunnerConfig, load: Load, clients: int, rounds: int
) -> dict[str, Any]:
    """Runs `rounds` requests, one after the other, for each of `clients` clients."""
    scheduler = Scheduler(config.scheduler, config.cache)
    rng = random.Random(f"{load}/{clients}")
    todo = clients * rounds
    params = SamplingParams(max_tokens=load.output, temperature=0.0)
    started = 0

    def send() -> None:
        nonlocal started
        prompt = tuple(rng.randrange(config.spec.vocab_size) for _ in range(load.prompt))
        scheduler.add(Request(id=f"r{started}", prompt=prompt, params=params))
        started += 1

    for _ in range(clients):
        send()
    pending: deque[Pending] = deque()
    tokens = most_running = 0
    begin = time.perf_counter()
    while scheduler.has_work or pending:
        plan = scheduler.plan()
        if plan is not None:
            pending.append(runner.launch(plan))
            most_running = max(most_running, scheduler.num_running)
        if len(pending) > 1 or plan is None:
            done = pending.popleft()
            for event in scheduler.commit(done.plan, runner.collect(done)):
                tokens += 1
                if event.finish is not None and started < todo:
                    send()
    elapsed = time.perf_counter() - begin
    assert tokens == todo * load.output, (tokens, todo)
    return {
        "load": f"{load.prompt}/{load.output}",
        "clients": clients,
        "tok_per_s": tokens / elapsed,
        "seconds": elapsed,
        "most_running": most_running,
        "preemptions": scheduler.num_preemptions,
    }


if __name__ == "__main__":
    main()
